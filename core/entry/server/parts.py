"""A sample's text taken apart: reasoning, content, calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from octavo.core.entry.reasoning import Answer, ReasoningParser, Thought
from octavo.core.entry.server.tools import Reading
from octavo.core.entry.tools.base import Arguments, CallBegin, CallEnd, Event, Text, ToolParser


class Parts:
    """Takes one sample's text apart as it comes, and keeps what it was.

    Each sample has one of its own. `push` and `finish` return deltas as the API has them.
    """

    def __init__(self, reading: Reading, include_reasoning: bool) -> None:
        self._reading = reading
        self._include_reasoning = include_reasoning
        self._reasoning: ReasoningParser | None = (
            None if reading.reasoning is None else reading.reasoning(reading.opened)
        )
        self._tools: ToolParser | None = (
            None if reading.tools is None else reading.tools(reading.use.callable)
        )
        self._content: list[str] = []
        self._thought: list[str] = []
        self._calls: list[dict[str, Any] | None] = []
        self._called = False
        self._left_out = False  # a call beyond the only one that may be

    def push(self, text: str) -> list[dict[str, Any]]:
        """Deltas that are certain after this further text."""
        return list(self._read(text))

    def finish(self, cut: bool) -> list[dict[str, Any]]:
        """Deltas of what was held back. cut: the text ends because no more was allowed."""
        deltas = []
        if self._reasoning is not None:
            deltas += list(self._pieces(self._reasoning.finish()))
        if self._tools is not None:
            deltas += list(self._events(self._tools.finish(cut)))
        return deltas

    def _read(self, text: str) -> Iterator[dict[str, Any]]:
        if self._reasoning is not None:
            yield from self._pieces(self._reasoning.push(text))
        else:
            yield from self._answer(text)

    def _pieces(self, pieces: Iterable[Thought | Answer]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            if isinstance(piece, Answer):
                yield from self._answer(piece.text)
            elif self._include_reasoning:
                self._thought.append(piece.text)
                yield {"reasoning": piece.text}

    def _answer(self, text: str) -> Iterator[dict[str, Any]]:
        if self._tools is not None:
            yield from self._events(self._tools.push(text))
        elif text:
            self._content.append(text)
            yield {"content": text}

    def _events(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        for event in events:
            index = len(self._calls) - 1
            if isinstance(event, Text):
                self._content.append(event.text)
                yield {"content": event.text}
            elif isinstance(event, CallBegin):
                self._left_out = self._called and not self._reading.use.many
                if not self._left_out:
                    yield self._begin(event.name)
            elif self._left_out:
                continue
            elif isinstance(event, Arguments):
                call = self._calls[index]
                assert call is not None
                call["function"]["arguments"] += event.text
                yield _call_delta(index, {"function": {"arguments": event.text}})
            elif isinstance(event, CallEnd):
                yield from self._end(event, index)

    def _begin(self, name: str) -> dict[str, Any]:
        assert self._tools is not None
        head = {"id": self._tools.make_id(), "type": "function"}
        self._calls.append({**head, "function": {"name": name, "arguments": ""}})
        function = {"name": name, "arguments": ""}
        return _call_delta(len(self._calls) - 1, {**head, "function": function})

    def _end(self, event: CallEnd, index: int) -> Iterator[dict[str, Any]]:
        if not event.broken:
            self._called = True
            return
        # A stream has told of it already; of a whole answer it is no part.
        self._calls[index] = None
        self._content.append(event.raw)
        if event.rest:
            yield {"content": event.rest}

    @property
    def called(self) -> bool:
        """There was a call."""
        return self._called

    def message(self) -> dict[str, Any]:
        """All of it as a message."""
        content = "".join(self._content)
        calls = [call for call in self._calls if call is not None]
        empty = None if calls or self._reasoning is not None else ""
        result: dict[str, Any] = {"role": "assistant", "content": content or empty, "refusal": None}
        if self._thought:
            result["reasoning"] = "".join(self._thought)
        if calls:
            result["tool_calls"] = calls
        return result


def _call_delta(index: int, call: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **call}]}
