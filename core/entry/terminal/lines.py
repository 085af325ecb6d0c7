"""Reading messages from a terminal or a pipe.

The terminal's lines are edited with readline: it is in the standard library, everybody's fingers and
`~/.inputrc` know it, and it costs no dependency and no start-up time. A message of several lines is
pasted (readline keeps a paste together), or written with a backslash at each line's end or between
two lines of three quotes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_QUOTES = '"""'
_HISTORY_LENGTH = 1000


class Lines:
    """Messages, one after the other.

    Args:
        history: where typed lines are kept between runs; None: nowhere.
        complete: the words that may stand where a line begins with the given text.
    """

    def __init__(
        self,
        *,
        history: Path | None = None,
        complete: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        self.interactive = sys.stdin.isatty()
        self._history = history
        self._readline: Any = None
        if self.interactive:
            with contextlib.suppress(ImportError):  # not on every platform
                import readline

                self._readline = readline
                self._set_up(complete)

    def _set_up(self, complete: Callable[[str], Sequence[str]] | None) -> None:
        readline = self._readline
        readline.set_history_length(_HISTORY_LENGTH)
        with contextlib.suppress(OSError):
            if self._history is not None and self._history.is_file():
                readline.read_history_file(self._history)
        if complete is not None:
            found: list[str] = []

            def completer(text: str, state: int) -> str | None:
                if state == 0:
                    found[:] = complete(readline.get_line_buffer())
                return found[state] if state < len(found) else None

            readline.set_completer_delims(" ")
            readline.set_completer(completer)
            readline.parse_and_bind("tab: complete")

    def read(self, prompt: str, more: str) -> str | None:
        """The next message, or None at the end. `prompt` and `more` are shown on a terminal: before
        the first line, and before those that continue it."""
        line = self._line(prompt)
        if line is None:
            return None
        if line.strip().startswith(_QUOTES):
            return self._quoted(line.strip().removeprefix(_QUOTES), more)
        parts = [line]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            following = self._line(more)
            if following is None:
                break
            parts.append(following)
        return "\n".join(parts).strip()

    def _quoted(self, first: str, more: str) -> str:
        parts, line = [], first
        while not line.rstrip().endswith(_QUOTES):
            parts.append(line)
            following = self._line(more)
            if following is None:
                return "\n".join(parts).strip()
            line = following
        parts.append(line.rstrip().removesuffix(_QUOTES))
        return "\n".join(parts).strip()

    def _line(self, prompt: str) -> str | None:
        if not self.interactive:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        try:
            return input(self._invisible(prompt))
        except EOFError:
            print()
            return None

    def _invisible(self, prompt: str) -> str:
        """The prompt with its colours marked as taking no room on the line."""
        if self._readline is None or "\x1b" not in prompt:
            return prompt
        before, _, rest = prompt.partition("\x1b")
        colour, _, text = rest.partition("m")
        text, _, after = text.partition("\x1b[0m")
        return f"{before}\x01\x1b{colour}m\x02{text}\x01\x1b[0m\x02{after}"

    def typed(self) -> str:
        """What stood on the line that Ctrl-C ended."""
        return str(self._readline.get_line_buffer()) if self._readline is not None else ""

    def close(self) -> None:
        """Keeps the history. A place that cannot be written costs the history, nothing else."""
        if self._readline is None or self._history is None:
            return
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._readline.write_history_file(self._history)
            self._history.chmod(0o600)
