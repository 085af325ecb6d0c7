"""JSON, a character at a time: what the parsers of JSON calls have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from octavo.core.entry.tools.base import Malformed, Reading, ToolParser

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_DEPTH = 512
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENTS, "type", "id")


class JsonScanner:
    """Follows one JSON object or list, and refuses the first character that cannot stand there."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._state = "value"
        self._token = ""
        self._hex = 0
        self._key = False
        self.done = False

    def take(self, character: str) -> str:
        """One character; returns it as it is to be passed on. A control character inside a string,
        which JSON does not allow and models write, is passed on as an escape.

        Raises:
            Malformed: it cannot stand here.
        """
        if self._state == "string":
            if character == '"':
                self._state = "colon" if self._key else "after"
            elif character == "\\":
                self._state = "escape"
            elif character < " ":
                return json.dumps(character)[1:-1]
        elif self._state == "escape":
            if character not in '"\\/bfnrtu':
                raise Malformed
            self._hex = 4
            self._state = "hex" if character == "u" else "string"
        elif self._state == "hex":
            if character not in "0123456789abcdefABCDEF":
                raise Malformed
            self._hex -= 1
            if not self._hex:
                self._state = "string"
        elif self._state == "token":
            self._in_token(character)
        else:
            self._between(character)
        return character

    def _in_token(self, character: str) -> None:
        if character.isalnum() or character in "+-.":
            self._token += character
            word = self._token
            if not (word[0] in "-0123456789" or any(w.startswith(word) for w in _WORDS)):
                raise Malformed
            return
        if self._token not in _WORDS and not _NUMBER.fullmatch(self._token):
            raise Malformed
        self._state = "after"
        self._between(character)

    def _between(self, character: str) -> None:
        state = self._state
        if character in " \n\r\t":
            return
        if state == "colon" and character == ":":
            self._state = "value"
        elif state == "after" and character == ",":
            self._key = self._stack[-1] == "{"
            self._state = "key" if self._key else "value"
        elif state in ("after", "first", "first key") and character in "]}":
            if not self._stack or self._stack.pop() + character not in ("[]", "{}"):
                raise Malformed
            self._state, self.done = "after", not self._stack
        elif state in ("key", "first key") and character == '"':
            self._key, self._state = True, "string"
        elif state in ("value", "first"):
            self._value(character)
        else:
            raise Malformed

    def _value(self, character: str) -> None:
        self._key = False
        if character in "[{":
            if len(self._stack) >= _DEPTH:
                raise Malformed
            self._stack.append(character)
            self._state = "first" if character == "[" else "first key"
        elif not self._stack:
            raise Malformed
        elif character == '"':
            self._state = "string"
        elif character in "-0123456789tfn":
            self._state, self._token = "token", character
        else:
            raise Malformed


class JsonCalls(ToolParser):
    """A parser of calls that are, or hold, JSON objects."""

    def scan(self, first: str, give: Callable[[str], None]) -> Reading[None]:
        """Reads an object or a list whose first character was read already; `give` gets its text as it
        comes."""
        scanner, character = JsonScanner(), first
        while True:
            try:
                given = scanner.take(character)
            except Malformed:
                raise self.fail(character) from None
            give(given)
            if scanner.done:
                return
            character = yield from self.get()
            if not character:
                raise Malformed

    def string(self, first: str, among: Iterable[str] = ()) -> Reading[str]:
        """Reads a JSON string whose first character was read already: one of `among`, if they are given."""
        if first != '"':
            raise self.fail(first)
        allowed = [json.dumps(word, ensure_ascii=False) for word in among]
        raw = first
        escaped = False
        while True:
            character = yield from self.get()
            if not character:
                raise Malformed
            raw += character
            if allowed and "\\" not in raw and not any(word.startswith(raw) for word in allowed):
                raise self.fail(character)
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                break
        try:
            return str(json.loads(raw, strict=False))
        except ValueError:
            raise Malformed from None

    def call_object(self) -> Reading[None]:
        """Reads `"name": …, "arguments": {…}}` in any order, behind the brace that opens it.

        The arguments may go by the name "parameters", be an object, a string that holds one, or be
        left out. The call begins when both its name and the beginning of its arguments are there; the
        closing brace may be missing behind them.
        """
        name: str | None = None
        held: list[str] | None = None  # arguments
        while True:
            character = yield from self.visible()
            key = yield from self.string(character, _KEYS)
            character = yield from self.visible()
            if character != ":":
                raise self.fail(character)
            character = yield from self.visible()
            if key == "name" and name is None:
                name = yield from self.string(character, self.names)
                if held is not None:
                    self.begin(name)
                    self.arguments("".join(held))
            elif key in _ARGUMENTS and held is None:
                held = []
                yield from self._arguments(character, name, held)
            else:
                yield from self._any_value(character)
            character = yield from self.visible()
            if character == ",":
                continue
            if character != "}":
                if name is None or held is None:
                    raise self.fail(character)
                self.unget(character)
            break
        if name is None:
            raise Malformed
        if held is None:
            self.begin(name)
            self.arguments("{}")
        self.end()

    def _arguments(self, first: str, name: str | None, held: list[str]) -> Reading[None]:
        """Reads arguments: gives them, or holds them when no name is known yet."""
        if first == "{":
            if name is not None:
                self.begin(name)
            yield from self.scan(first, held.append if name is None else self.arguments)
            return
        if first == "n":
            yield from self.expect("ull")
            text = "{}"
        else:
            text = yield from self.string(first)
            try:
                if not isinstance(json.loads(text), dict):
                    raise Malformed
            except (ValueError, RecursionError):
                raise Malformed from None
        held.append(text)
        if name is not None:
            self.begin(name)
            self.arguments(text)

    def _any_value(self, first: str) -> Reading[None]:
        if first and first in "[{":
            yield from self.scan(first, _nothing)
        elif first == '"':
            yield from self.string(first)
        elif first and first in "-0123456789tfn":
            token = first
            while (character := (yield from self.get())).isalnum() or (
                character and character in "+-."
            ):
                token += character
            self.unget(character)
            if token not in _WORDS and not _NUMBER.fullmatch(token):
                raise Malformed
        else:
            raise self.fail(first)


def _nothing(text: str) -> None:
    """Where what is read is wanted by nobody."""
