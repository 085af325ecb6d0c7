"""What a tool parser is: it reads a model's text and tells content from calls of tools.

A parser reads one character at a time, as a coroutine, so what it finds cannot depend on how the text
was cut into pieces: a stream and a whole answer are the same. It holds text back only while that may
still become a call, and gives back as content what turns out to be none.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]
"""A coroutine that is sent characters, "" at the end, and returns a T."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments, an object."""

    name: str  # as the model writes it
    parameters: dict[str, Any]
    strict: bool = (
        False  # a call of it must follow its schema, also where the model is free to call
    )


@dataclass(frozen=True, slots=True)
class Text:
    """Content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call, and the name of its tool. Its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the call's arguments: the pieces joined are a JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call's end.

    broken: it is no call after all. raw: all of its text; rest: what of it stands behind the last
    arguments that were given.
    """

    broken: bool = False
    raw: str = ""
    rest: str = ""


Event = Text | CallBegin | Arguments | CallEnd


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes calls: `before`, calls with `between` in between, `after`; a call is `head`
    (in which NAME stands for the tool's name), its arguments and `tail`.

    trigger: the beginning by which a call in running text is known; "" where there is none.
    python: arguments are `key=value, …` instead of a JSON object.
    """

    head: str
    tail: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    trigger: str = ""
    python: bool = False


class Malformed(Exception):
    """This is no call."""


class ToolParser(ABC):
    """Finds the calls in one sample's text. A subclass says what opens a call, and reads one.

    markers: the markup; where one is a special token of the vocabulary, it is shown to the parser.
    openings: texts that open a call anywhere. blank_openings: those that do so only with nothing but
    white space in front of them, or behind another call.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    openings: ClassVar[tuple[str, ...]] = ()
    blank_openings: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Iterable[Tool]) -> None:
        self.names = frozenset(tool.name for tool in tools)
        self._events: list[Event] = []
        self._raw: list[str] = []
        self._back = ""
        self._ended = self._cut = False
        self._blank = True  # nothing but white space so far, or behind a call
        self._open = False
        self._shown = 0
        self._any = False
        self._run = self._main()
        next(self._run)

    @classmethod
    @abstractmethod
    def fits(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        """Whether a model with this chat template and these tokens writes calls in this form."""

    @classmethod
    @abstractmethod
    def form(cls, template: str) -> CallForm:
        """The form that the template shows, for calls that a grammar enforces."""

    @abstractmethod
    def read(self, opening: str) -> Reading[None]:
        """Reads calls behind `opening`, by `begin`, `arguments` and `end`; raises Malformed by `fail`."""

    @classmethod
    def make_id(cls) -> str:
        """An id for a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    # ------------------------------------------------------------------------------- from outside

    def push(self, text: str) -> Sequence[Event]:
        """What is certain after this further text."""
        for character in text:
            self._run.send(character)
        return self._take()

    def finish(self, cut: bool = False) -> Sequence[Event]:
        """What was held back. cut: the text ends because no more was allowed, so that a call may be
        unfinished without being malformed."""
        self._cut = cut
        with contextlib.suppress(StopIteration):
            self._run.send("")
        return self._take()

    def _take(self) -> Sequence[Event]:
        events, self._events = self._events, []
        return events

    # -------------------------------------------------------------------------------- for subclasses

    def get(self) -> Reading[str]:
        """The next character; "" at the end."""
        if self._back:
            character, self._back = self._back[0], self._back[1:]
        elif self._ended:
            return ""
        else:
            character = yield
            if not character:
                self._ended = True
                return ""
        self._raw.append(character)
        return character

    def unget(self, character: str) -> None:
        """Gives back the character that was read last."""
        if character:
            self._back = character + self._back
            self._raw.pop()

    def fail(self, character: str = "") -> Malformed:
        """The exception to raise; the character that was read last is read again, as content."""
        self.unget(character)
        return Malformed()

    def visible(self) -> Reading[str]:
        """The next character that is no white space."""
        while (character := (yield from self.get())).isspace():
            pass
        return character

    def expect(self, text: str) -> Reading[None]:
        """Reads exactly this."""
        for wanted in text:
            character = yield from self.get()
            if character != wanted:
                raise self.fail(character)

    def closing(self, text: str) -> Reading[None]:
        """Reads what should follow a call, behind white space. The end of the text may cut it short."""
        character = yield from self.visible()
        self.unget(character)
        for wanted in text:
            character = yield from self.get()
            if not character:
                break
            if character != wanted:
                raise self.fail(character)
        self._settle()

    def word(self, character: str, among: Iterable[str]) -> Reading[tuple[str, str]]:
        """The longest beginning of one of these words, and the character behind it."""
        word = ""
        while character and any(one.startswith(word + character) for one in among):
            word += character
            character = yield from self.get()
        return word, character

    def begin(self, name: str) -> None:
        """A call begins. Raises Malformed: there is no such tool."""
        if name not in self.names:
            raise Malformed
        self._open = self._any = True
        self._events.append(CallBegin(name))

    def arguments(self, text: str) -> None:
        """Further text of the arguments; all that was read so far is in it."""
        self._shown = len(self._raw)
        last = self._events[-1] if self._events else None
        if isinstance(last, Arguments):
            self._events[-1] = Arguments(last.text + text)
        else:
            self._events.append(Arguments(text))

    def end(self) -> None:
        """The call is whole. What follows begins anew."""
        self._events.append(CallEnd())
        self._settle()
        self._blank = True

    def text(self, text: str) -> None:
        """Content."""
        if not text:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, Text):
            self._events[-1] = Text(last.text + text)
        else:
            self._events.append(Text(text))

    def _settle(self) -> None:
        self._open, self._shown = False, 0
        self._raw.clear()

    def _main(self) -> Reading[None]:
        while (opening := (yield from self._until_opening())) is not None:
            try:
                yield from self.read(opening)
            except Malformed:
                self._give_back()

    def _until_opening(self) -> Reading[str | None]:
        """Gives content until a call opens. White space around calls is left out."""
        lead = held = ""
        while True:
            self._raw.clear()
            character = yield from self.get()
            if not character:
                # What was no call, or white space alone; behind a call it is left out.
                self.text(held and lead + held if self._any else lead + held)
                return None
            if self._blank and not held and character.isspace():
                lead += character
                continue
            held += character
            while held and not self._may_open(held):
                self.text(lead + held[0])
                lead, held, self._blank = "", held[1:], False
            if held and (held in self.openings or (self._blank and held in self.blank_openings)):
                self._raw = list(lead + held)
                return held

    def _may_open(self, held: str) -> bool:
        if any(opening.startswith(held) for opening in self.openings):
            return True
        return self._blank and any(opening.startswith(held) for opening in self.blank_openings)

    def _give_back(self) -> None:
        """What was read of something that is no call."""
        raw, shown, was_open = "".join(self._raw), self._shown, self._open
        self._settle()
        if not was_open:
            if raw.strip() or not self._any:
                self.text(raw)
                self._blank = False
        elif self._ended and self._cut:
            self._events.append(CallEnd())
        else:
            self._blank = False
            self._events.append(CallEnd(True, raw, raw[shown:]))
