"""`{"name": …, "parameters": {…}}` as the whole answer, or behind `<|python_tag|>`: Llama 3."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.entry.tools.base import CallForm, Reading
from octavo.core.entry.tools.json_text import JsonCalls

TAG = "<|python_tag|>"


class Llama3Parser(JsonCalls):
    """JSON objects, several with semicolons between them."""

    markers = (TAG,)
    openings = (TAG,)
    blank_openings = ("{",)

    @classmethod
    def fits(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        """Its templates show the key "parameters"; the tag is a token of its vocabulary."""
        return '"parameters":' in template and (TAG in template or has_token(TAG))

    @classmethod
    def form(cls, template: str) -> CallForm:
        """Without the tag, as its templates ask for it."""
        return CallForm(head='{"name": "NAME", "parameters": ', tail="}", between="; ")

    def read(self, opening: str) -> Reading[None]:
        """Calls with semicolons between them."""
        if opening == TAG:
            character = yield from self.visible()
            if character != "{":
                raise self.fail(character)
        while True:
            yield from self.call_object()
            character = yield from self.visible()
            if character != ";":
                self.unget(character)
                return
            character = yield from self.visible()
            if character != "{":
                raise self.fail(character)
