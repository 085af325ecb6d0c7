"""POST /v1/responses: items instead of messages, and typed events instead of chunks.

What is drawn, and how text, reasoning and calls are told apart, is chat's. Nothing is kept: each request
brings all that came before.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from octavo.core.entry.server.answer import Usage, finish_fields
from octavo.core.entry.server.chat import Choice, begun
from octavo.core.entry.server.errors import ApiError, as_api_error
from octavo.core.entry.server.fanout import Outputs
from octavo.core.entry.server.http import Answer, Call
from octavo.core.entry.server.logprobs import TokenNames, chat_logprobs
from octavo.core.entry.server.responses_request import ResponsesRequest, in_own_words
from octavo.core.entry.server.state import ServerState
from octavo.core.entry.server.tools import Reading
from octavo.core.params import RequestOutputKind, SamplingParams
from octavo.core.types import CompletionOutput, RequestOutput

_encode = msgspec.json.Encoder().encode
Event = dict[str, Any]


async def responses(state: ServerState, call: Call) -> Answer:
    """The endpoint's handler."""
    request = state.decode(call, ResponsesRequest)
    state.ready()
    model = state.check_model(request.model)
    state.check_task("generate")
    try:
        params, reading, outputs = await begun(state, request.as_chat(), RequestOutputKind.DELTA)
    except Exception as error:
        raise in_own_words(as_api_error(error)) from error
    outputs = _in_own_words(outputs)
    answer = _Response(state, call, request, model, params, reading)
    return answer.stream(outputs) if request.stream else await answer.whole(outputs)


async def _in_own_words(outputs: Outputs) -> Outputs:
    """The same outputs; errors name the fields as they are here."""
    async with aclosing(outputs) as own:
        try:
            async for item in own:
                yield item
        except Exception as error:
            raise in_own_words(as_api_error(error)) from error


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


async def _again(first: tuple[int, RequestOutput], rest: Outputs) -> Outputs:
    """All outputs, when the first was already taken."""
    async with aclosing(rest) as others:
        yield first
        async for item in others:
            yield item


class _Items:
    """The output's items as they grow, and the events that tell of it."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._call: int | None = None  # index of the call that is open

    def take(self, delta: dict[str, Any], logprobs: list[Any]) -> Iterator[Event]:
        """A delta as chat has it. logprobs: of the tokens that brought it, for text."""
        if "content" in delta:
            yield from self._text("message", "output_text", delta["content"], logprobs)
        elif "reasoning" in delta:
            yield from self._text("reasoning", "reasoning_text", delta["reasoning"], [])
        for call in delta.get("tool_calls", ()):
            if call["index"] != self._call:
                yield from self.close()
                self._call = call["index"]
                head = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                yield from self._begin({"type": "function_call", "id": _new_id("fc"), **head})
            assert self._open is not None
            if text := call["function"]["arguments"]:
                self._open["arguments"] += text
                yield self._event("response.function_call_arguments.delta", delta=text)

    def _text(self, kind: str, part: str, text: str, logprobs: list[Any]) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            if kind == "message":
                head = {"id": _new_id("msg"), "role": "assistant", "content": []}
            else:
                head = {"id": _new_id("rs"), "summary": [], "content": []}
            yield from self._begin({"type": kind, **head})
            assert self._open is not None
            own: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
            self._open["content"].append({"type": part, "text": "", **own})
            yield self._event("response.content_part.added", True, part=self._part())
        assert self._open is not None
        if not text and not logprobs:
            return
        self._open["content"][0]["text"] += text
        extra: dict[str, Any] = {}
        if kind == "message":
            self._open["content"][0]["logprobs"] += logprobs
            extra["logprobs"] = logprobs
        yield self._event(f"response.{part}.delta", True, delta=text, **extra)

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self._open = {**item, "status": "in_progress"}
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.done),
            "item": _copied(self._open),
        }

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        return dict(self._open["content"][0])

    def _event(self, kind: str, in_part: bool = False, **fields: Any) -> Event:
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": len(self.done)}
        return {"type": kind, **where, **({"content_index": 0} if in_part else {}), **fields}

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Ends the item that is open."""
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            if not _is_object(item["arguments"]):
                status = "incomplete"
            yield self._event(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            part = self._part()
            extra = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._event(f"response.{part['type']}.done", True, text=part["text"], **extra)
            yield self._event("response.content_part.done", True, part=part)
        item["status"] = status
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.done),
            "item": _copied(item),
        }
        self.done.append(item)
        self._open = None

    def empty(self) -> bool:
        """Whether nothing came."""
        return not self.done and self._open is None


def _copied(item: dict[str, Any]) -> dict[str, Any]:
    copy = dict(item)
    if "content" in copy:
        copy["content"] = [dict(part) for part in copy["content"]]
    return copy


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class _Response:
    """Makes the answer of one request out of the engine's outputs."""

    def __init__(
        self,
        state: ServerState,
        call: Call,
        request: ResponsesRequest,
        model: str,
        params: SamplingParams,
        reading: Reading,
    ) -> None:
        tokenizer = state.ready().get_tokenizer()
        self._request, self._params = request, params
        self._usage = Usage(call)
        if reading.reasoning is not None:
            self._usage.reasoning = {}
        self._choice = Choice(reading, True, tokenizer)
        self._names = TokenNames(tokenizer, False)
        self._items = _Items()
        self._pending: list[Any] = []  # logprobs of tokens whose text is held back
        self._number = 0
        self._head: dict[str, Any] = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(request.text or {})},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    def _json(self, status: str, **fields: Any) -> dict[str, Any]:
        begun = {
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._items.done,
            "usage": None,
        }
        return {**self._head, **begun, **fields}

    def _ended(self, sample: CompletionOutput) -> dict[str, Any]:
        """The response once all has come.

        Raises:
            ApiError: generation failed.
        """
        finish_fields(sample)
        usage = self._usage.json()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        spent = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        fields: dict[str, Any] = {
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": spent},
                "total_tokens": usage["total_tokens"],
            }
        }
        if sample.finish_reason == "length":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
            return self._json("incomplete", **fields)
        return self._json("completed", **fields)

    def _take(self, output: RequestOutput) -> Iterator[Event]:
        """Events of what is new."""
        self._usage.add(0, output)
        [sample] = output.outputs
        counter = self._choice.counter
        if counter is not None and self._usage.reasoning is not None:
            counter.add(sample.token_ids)
            self._usage.reasoning[0] = counter.count
        if self._request.wants_logprobs and sample.logprobs:
            top = self._params.logprobs or 0
            self._pending += chat_logprobs(sample.logprobs, top, self._names)["content"]
        parts = self._choice.parts
        deltas = parts.push(sample.text)
        ended = sample.finish_reason is not None
        if ended:
            deltas += parts.finish(sample.finish_reason == "length")
        for delta in deltas:
            logprobs, self._pending = self._pending, []
            yield from self._items.take(delta, logprobs)
        if ended and sample.finish_reason != "error":
            if self._items.empty():
                yield from self._items.take({"content": ""}, [])
            yield from self._items.close(
                "incomplete" if sample.finish_reason == "length" else "completed"
            )

    async def whole(self, outputs: Outputs) -> bytes:
        """One JSON answer."""
        last = None
        async for _, output in outputs:
            for _event in self._take(output):
                pass
            last = output.outputs[0]
        assert last is not None
        return _encode(self._ended(last))

    async def stream(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each with its type and number. None before the first output is there: what
        the engine refuses is an ordinary error."""
        first = await anext(outputs)
        yield self._sent({"type": "response.created", "response": self._json("in_progress")})
        yield self._sent({"type": "response.in_progress", "response": self._json("in_progress")})
        last = None
        try:
            async for _, output in _again(first, outputs):
                events = [self._sent(event) for event in self._take(output)]
                if events:
                    yield b"".join(events)
                last = output.outputs[0]
            assert last is not None
            ended = self._ended(last)
        except Exception as error:
            found: ApiError = as_api_error(error)
            problem = {"code": "server_error", "message": found.message}
            yield self._sent(
                {"type": "response.failed", "response": self._json("failed", error=problem)}
            )
            return
        yield self._sent({"type": f"response.{ended['status']}", "response": ended})

    def _sent(self, event: Event) -> bytes:
        number, self._number = self._number, self._number + 1
        kind: str = event["type"]
        body = _encode({**event, "sequence_number": number})
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
