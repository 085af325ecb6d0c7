"""`[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or newer `[TOOL_CALLS]name[ARGS]{…}`: Mistral."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from octavo.core.entry.tools.base import CallForm, Reading
from octavo.core.entry.tools.json_text import JsonCalls

OPEN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LETTERS = string.ascii_letters + string.digits


class MistralParser(JsonCalls):
    """A list of calls behind one marker, or one call behind each."""

    markers = (OPEN, ID, ARGS)
    openings = (OPEN,)

    @classmethod
    def fits(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        """The marker stands in its templates, or is a token."""
        return OPEN in template or has_token(OPEN)

    @classmethod
    def form(cls, template: str) -> CallForm:
        """Lists, unless the template has the newer form."""
        if ARGS in template:
            return CallForm(head=f"{OPEN}NAME{ARGS}", trigger=OPEN)
        space = " " if f"{OPEN} [" in template else ""
        return CallForm(
            before=f"{OPEN}{space}[",
            head='{"name": "NAME", "arguments": ',
            tail="}",
            between=", ",
            after="]",
            trigger=OPEN,
        )

    @classmethod
    def make_id(cls) -> str:
        """Its templates take ids of nine letters and digits alone."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def read(self, opening: str) -> Reading[None]:
        """Either form."""
        character = yield from self.visible()
        if character == "[":
            yield from self._list()
        elif character == "{":
            yield from self.call_object()
        else:
            yield from self._named(character)

    def _list(self) -> Reading[None]:
        while True:
            character = yield from self.visible()
            if character != "{":
                raise self.fail(character)
            yield from self.call_object()
            character = yield from self.visible()
            if character == "]":
                self._settle()
                return
            if character != ",":
                raise self.fail(character)

    def _named(self, character: str) -> Reading[None]:
        name, character = yield from self.word(character, self.names)
        if name not in self.names:
            raise self.fail(character)
        if character == "[":
            character = yield from self.get()
            if character == "C":
                yield from self.expect(ID[2:])
                while (character := (yield from self.get())) and character != "[":
                    pass
                character = yield from self.get()
            if character != "A":
                raise self.fail(character)
            yield from self.expect(ARGS[2:])
            character = yield from self.get()
        if character.isspace():
            character = yield from self.visible()
        if character != "{":
            raise self.fail(character)
        self.begin(name)
        yield from self.scan(character, self.arguments)
        self.end()
