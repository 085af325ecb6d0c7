"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen and many others."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.entry.tools.base import CallForm, Reading
from octavo.core.entry.tools.json_text import JsonCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCalls):
    """One pair of tags for each call."""

    markers = (OPEN, CLOSE)
    openings = (OPEN,)

    @classmethod
    def fits(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        """Qwen's coders write `<function=…>` between the same tags: another form."""
        return OPEN in template and "<function=" not in template

    @classmethod
    def form(cls, template: str) -> CallForm:
        """As Qwen's template shows it."""
        return CallForm(
            head=f'{OPEN}\n{{"name": "NAME", "arguments": ',
            tail=f"}}\n{CLOSE}",
            between="\n",
            trigger=OPEN,
        )

    def read(self, opening: str) -> Reading[None]:
        """One call. Its closing tag may be missing at the end."""
        character = yield from self.visible()
        if character != "{":
            raise self.fail(character)
        yield from self.call_object()
        yield from self.closing(CLOSE)
