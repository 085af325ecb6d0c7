"""A conversation at a terminal: messages, commands, answers as they come."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.core.config import ConfigError, nearest, wants_color
from octavo.core.entry.cli.failure import CommandFailed
from octavo.core.entry.cli.sampling import CHAT, parse_typed, shown_values
from octavo.core.entry.terminal.lines import Lines
from octavo.core.entry.terminal.partners import Message, Partner, Piece
from octavo.core.params import ParamError

COMMANDS = {
    "/help": "this list",
    "/system [TEXT]": "show, set or (with -) remove the system message",
    "/set [NAME VALUE]": "show or set sampling parameters; default takes one back",
    "/retry": "answer the last message again",
    "/undo": "forget the last message and its answer",
    "/reset": "forget the conversation",
    "/history": "show the conversation",
    "/save FILE": "write the conversation",
    "/load FILE": "read a conversation, and go on with it",
    "/stats": "the model, the device, and what was generated",
    "/quit": "leave (also Ctrl-D)",
}
_ROLES = ("system", "user", "assistant")
# A model's text must not move the cursor, retitle the window or worse.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Leave(Exception):
    """The user is done."""


class Chat:
    """One conversation.

    Raises in `run`: what `Partner.answer` raises, when nobody is there to read it and go on.
    """

    def __init__(
        self,
        partner: Partner,
        *,
        system: str | None = None,
        values: dict[str, Any] | None = None,
        history: Path | None = None,
    ) -> None:
        self._partner = partner
        self._values = dict(values or {})
        self._messages: list[Message] = []
        if system:
            self._messages.append({"role": "system", "content": system})
        self._lines = Lines(history=history, complete=complete)
        self._terminal = sys.stdout.isatty()
        self._color = sys.stderr.isatty() and wants_color()
        self._answers = self._tokens = 0
        self._seconds = 0.0

    def run(self) -> None:
        """Talks until the input ends or the user leaves.

        Raises:
            KeyboardInterrupt: left by Ctrl-C.
        """
        interactive = self._lines.interactive
        if interactive:
            self._note(f"{self._partner.name}. /help lists the commands, Ctrl-C stops an answer.")
        warned = False
        try:
            while True:
                try:
                    text = self._lines.read(self._prompt("> "), self._prompt("… "))
                except KeyboardInterrupt:
                    empty = not self._lines.typed()
                    if not interactive or (warned and empty):
                        raise
                    warned = True
                    print()
                    self._note("Ctrl-C again at an empty line leaves, and so does /quit.")
                    continue
                warned = False
                if text is None:
                    return
                if text:
                    self._take(text)
        except Leave:
            return
        finally:
            self._lines.close()

    def _take(self, text: str) -> None:
        try:
            if text.startswith("/") and not text.startswith("//"):
                self._command(text)
            else:
                text = text.removeprefix("/") if text.startswith("//") else text
                self._messages.append({"role": "user", "content": text})
                self._answer()
        except (ParamError, ConfigError, CommandFailed) as error:
            if not self._lines.interactive:
                raise
            self._note(f"error: {error}")

    # ------------------------------------------------------------------------------------ answers

    def _answer(self) -> None:
        """Answers the last message. One that could not be answered is forgotten."""
        begun = time.perf_counter()
        first = None
        parts: list[str] = []
        last = Piece("", 0)
        stopped = False
        try:
            with _Stop(not self._partner.interruptible) as stop:
                pieces = self._partner.answer(self._messages, self._values)
                with contextlib.closing(pieces):  # type: ignore[type-var]
                    for piece in pieces:
                        if piece.tokens and first is None:
                            first = time.perf_counter()
                        self._write(piece.text)
                        parts.append(piece.text)
                        reason = piece.finish_reason or last.finish_reason
                        last = piece
                        last.finish_reason = reason
                        if stop.asked:
                            stopped = True
                            break
        except KeyboardInterrupt:
            if not self._partner.interruptible:
                raise
            stopped = True
        except Exception:
            self._messages.pop()
            raise
        self._write("\n")
        self._messages.append({"role": "assistant", "content": "".join(parts)})
        ended = time.perf_counter()
        self._count(last, ended - (first or ended), (first or ended) - begun, stopped)

    def _count(self, last: Piece, seconds: float, wait: float, stopped: bool) -> None:
        self._answers += 1
        self._tokens += last.tokens
        self._seconds += seconds + wait
        rate = f"{(last.tokens - 1) / seconds:.1f} tokens/s" if last.tokens > 1 and seconds else ""
        facts = [f"{last.tokens} tokens", rate, f"first after {wait:.2f} s"]
        if last.prompt_tokens is not None:
            facts.append(f"{last.prompt_tokens + last.tokens} in context")
        if stopped:
            facts.append("stopped")
        elif last.finish_reason == "length":
            facts.append("cut off by max_tokens or the context")
        self._note("[" + ", ".join(fact for fact in facts if fact) + "]")

    def _write(self, text: str) -> None:
        sys.stdout.write(_CONTROL.sub("", text) if self._terminal else text)
        sys.stdout.flush()

    def _note(self, text: str) -> None:
        sys.stdout.flush()
        print(f"\x1b[2m{text}\x1b[0m" if self._color else text, file=sys.stderr, flush=True)

    def _prompt(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._color and self._terminal else text

    # ----------------------------------------------------------------------------------- commands

    def _command(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        known = [name.split()[0] for name in COMMANDS]
        if word == "/exit":
            word = "/quit"
        if word not in known:
            raise ConfigError(
                f"no command {word}{nearest(word, known)}; /help lists them, and a message that "
                "begins with / is written with //"
            )
        getattr(self, f"_do_{word[1:]}")(rest.strip())

    def _do_help(self, _: str) -> None:
        for name, text in COMMANDS.items():
            self._note(f"  {name:<18} {text}")
        self._note('  several lines: end each with \\, or write them between """ and """')

    def _do_quit(self, _: str) -> None:
        raise Leave

    def _do_reset(self, _: str) -> None:
        self._messages = [m for m in self._messages if m["role"] == "system"]
        self._note("forgotten, save for the system message" if self._messages else "forgotten")

    def _do_system(self, text: str) -> None:
        others = [m for m in self._messages if m["role"] != "system"]
        if text:
            system = [] if text == "-" else [{"role": "system", "content": text}]
            self._messages = [*system, *others]
        found = [m["content"] for m in self._messages if m["role"] == "system"]
        self._note(f"system: {found[0]}" if found else "no system message")

    def _do_set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            name = name.replace("-", "_")
            if not value.strip():
                raise ConfigError(f"/set {name} needs a value, or default")
            parsed = parse_typed(name, value.strip())
            self._values.pop(name, None)
            if parsed is not None:
                self._values[name] = parsed
        self._note(shown_values(self._values))

    def _do_undo(self, _: str) -> None:
        self._last_user()
        while self._messages.pop()["role"] != "user":
            pass
        self._note(f"{len(self._messages)} messages left")

    def _do_retry(self, _: str) -> None:
        at = self._last_user()
        kept = self._messages[at + 1 :]
        del self._messages[at + 1 :]
        try:
            self._answer()
        except Exception:
            self._messages += [self._retried, *kept]
            raise

    def _last_user(self) -> int:
        for at in range(len(self._messages) - 1, -1, -1):
            if self._messages[at]["role"] == "user":
                self._retried = self._messages[at]
                return at
        raise ConfigError("there is no message yet")

    def _do_history(self, _: str) -> None:
        for message in self._messages:
            self._note(f"{message['role']}:")
            self._write(message["content"] + "\n")

    def _do_save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save needs a file's name")
        record = {"model": self._partner.name, "sampling": self._values, "messages": self._messages}
        path = Path(name).expanduser()
        try:
            path.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from None
        self._note(f"{len(self._messages)} messages in {path}")

    def _do_load(self, name: str) -> None:
        if not name:
            raise ConfigError("/load needs a file's name")
        path = Path(name).expanduser()
        try:
            value = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        messages = value.get("messages") if isinstance(value, dict) else value
        self._messages = list(_checked(messages, path))
        self._note(f"{len(self._messages)} messages from {path}")

    def _do_stats(self, _: str) -> None:
        rate = self._tokens / self._seconds if self._seconds else 0.0
        for name, fact in (
            *self._partner.facts(),
            ("sampling", shown_values(self._values)),
            ("messages", str(len(self._messages))),
            ("answers", f"{self._answers}: {self._tokens} tokens, {rate:.1f} tokens/s over all"),
        ):
            self._note(f"  {name:<9} {fact}")


def _checked(messages: Any, path: Path) -> Iterator[Message]:
    if not isinstance(messages, list):
        raise ConfigError(f"{path} holds no list of messages")
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(content, str):
            raise ConfigError(
                f"{path}: a message is {{role: {'|'.join(_ROLES)}, content: text}}, "
                f"got {message!r:.80}"
            )
        yield {"role": role, "content": content}


def complete(line: str) -> list[str]:
    """What the word at the end of `line` may become: commands, and names after /set."""
    if line.startswith("/set "):
        typed = line.removeprefix("/set ")
        return [f"{name} " for name in CHAT if " " not in typed and name.startswith(typed)]
    if " " in line or not line.startswith("/"):
        return []
    return [name.split()[0] + " " for name in COMMANDS if name.startswith(line)]


class _Stop:
    """While an answer runs, Ctrl-C only asks for its end, where breaking in would do harm.

    A second one breaks in all the same.
    """

    def __init__(self, gently: bool) -> None:
        self.asked = False
        self._gently = gently
        self._before: Any = None

    def __enter__(self) -> _Stop:
        if self._gently:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: object) -> None:
        if self._gently:
            signal.signal(signal.SIGINT, self._before)
