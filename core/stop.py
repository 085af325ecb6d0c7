"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Watches a text that comes in pieces for stop strings.

    Of several matches the one that ends first wins, because generation stops there; of those that
    end at the same character, the longest. So the outcome does not depend on how the text is cut
    into pieces. Held back is only the longest end of the text that is the beginning of a stop
    string, so that text streams before a stop's length is reached.

    include_stop: whether the text given out ends with the stop string or before it.
    Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, check: bool = True) -> tuple[str, str | None]:
        """(text to give out now, the stop string that was matched or None).

        check=False passes the text through unseen, for tokens before a minimum length: no match
        begins in it. After a match nothing more is given out.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        if not check:
            text, self._held = self._held + text, ""
            return text, None
        text = self._held + text
        end, stop = self._first_match(text)
        if stop is not None:
            self.matched, self._held = stop, ""
            return text[: end if self._include else end - len(stop)], stop
        keep = self._open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, when the text ends without a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str | None]:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        return (0, None) if best is None else (best[0], best[2])

    def _open_suffix(self, text: str) -> int:
        """The length of the longest end of ``text`` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while at >= 0 and len(text) - at > longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest
