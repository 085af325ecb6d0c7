"""`[name(key="value", …), …]` as the whole answer: Llama 4, Llama 3.2, OLMo and others.

Arguments are Python's literals. They are told as JSON, each as soon as it is certain.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable

from octavo.core.entry.tools.base import CallForm, Malformed, Reading, ToolParser

START, END = "<|python_start|>", "<|python_end|>"
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}
_DEPTH = 64


class PythonicParser(ToolParser):
    """A list of calls as Python writes them."""

    markers = (START, END)
    openings = (START,)
    blank_openings = ("[",)

    @classmethod
    def fits(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        """The templates show a list of functions with parameters."""
        return "[func_name1(" in template or START in template

    @classmethod
    def form(cls, template: str) -> CallForm:
        """Without the markers, which are optional."""
        return CallForm(before="[", head="NAME(", tail=")", between=", ", after="]", python=True)

    def read(self, opening: str) -> Reading[None]:
        """The list."""
        if opening == START:
            character = yield from self.visible()
            if character != "[":
                raise self.fail(character)
        while True:
            yield from self._call((yield from self.visible()))
            character = yield from self.visible()
            if character == "]":
                break
            if character != ",":
                raise self.fail(character)
        self._settle()
        if opening == START:
            yield from self.closing(END)

    def _call(self, character: str) -> Reading[None]:
        name, character = yield from self.word(character, self.names)
        if name not in self.names or character != "(":
            raise self.fail(character)
        self.begin(name)
        self.arguments("{")
        first = True
        while (character := (yield from self.visible())) != ")":
            key = ""
            while character.isalnum() or character == "_":
                key += character
                character = yield from self.get()
            if character.isspace():
                character = yield from self.visible()
            if not key or character != "=":
                raise self.fail(character)
            self.arguments(f"{'' if first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
            first = False
            yield from self._value((yield from self.visible()), 0)
            character = yield from self.visible()
            if character == ")":
                break
            if character != ",":
                raise self.fail(character)
        self.arguments("}")
        self.end()

    def _value(self, first: str, depth: int) -> Reading[None]:
        if depth > _DEPTH:
            raise self.fail(first)
        if first and first in "'\"":
            yield from self._string(first)
        elif first == "{":
            yield from self._dict(depth)
        elif first and first in "[(":
            yield from self._list("]" if first == "[" else ")", depth)
        else:
            self.arguments(self._literal((yield from self._token(first))))

    def _list(self, close: str, depth: int) -> Reading[None]:
        self.arguments("[")
        first = True
        while (character := (yield from self.visible())) != close:
            if not first:
                self.arguments(", ")
            first = False
            yield from self._value(character, depth + 1)
            character = yield from self.visible()
            if character == close:
                break
            if character != ",":
                raise self.fail(character)
        self.arguments("]")

    def _dict(self, depth: int) -> Reading[None]:
        self.arguments("{")
        first = True
        while (character := (yield from self.visible())) != "}":
            if not first:
                self.arguments(", ")
            first = False
            if not character or character not in "'\"":
                raise self.fail(character)
            yield from self._string(character)
            character = yield from self.visible()
            if character != ":":
                raise self.fail(character)
            self.arguments(": ")
            yield from self._value((yield from self.visible()), depth + 1)
            character = yield from self.visible()
            if character == "}":
                break
            if character != ",":
                raise self.fail(character)
        self.arguments("}")

    def _token(self, character: str) -> Reading[str]:
        token = ""
        while character and (character.isalnum() or character in "+-._"):
            token += character
            character = yield from self.get()
        self.unget(character)
        return token

    @staticmethod
    def _literal(token: str) -> str:
        if token in _WORDS:
            return _WORDS[token]
        if _NUMBER.fullmatch(token):
            return token
        try:
            value = ast.literal_eval(token)
            if type(value) not in (int, float):
                raise Malformed
            return json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError):
            raise Malformed from None

    def _string(self, quote: str) -> Reading[None]:
        """A string, told as JSON's while it comes."""
        self.arguments('"')
        close = quote
        character = yield from self.get()
        if character == quote:
            character = yield from self.get()
            if character != quote:  # the empty string
                self.unget(character)
                self.arguments('"')
                return
            close = quote * 3
            character = yield from self.get()
        run = 0
        while True:
            if not character:
                raise Malformed
            if character == quote:
                run += 1
                if run == len(close):
                    break
            else:
                self._give(quote * run)
                run = 0
                if character == "\\":
                    yield from self._escape()
                else:
                    self._give(character)
            character = yield from self.get()
        self.arguments('"')

    def _escape(self) -> Reading[None]:
        character = yield from self.get()
        if character in _ESCAPES:
            self._give(_ESCAPES[character])
        elif character in _HEX:
            digits = ""
            for _ in range(_HEX[character]):
                digits += yield from self.get()
            try:
                self._give(chr(int(digits, 16)))
            except (ValueError, OverflowError):
                raise Malformed from None
        elif character:
            self._give("\\" + character)  # as Python reads an escape that is none

    def _give(self, text: str) -> None:
        if text:
            alone = any("\ud800" <= character <= "\udfff" for character in text)
            self.arguments(json.dumps(text, ensure_ascii=alone)[1:-1])
