"""OpenAI batch files: one request a line in, one answer a line out, by the server's own endpoints.

Format: https://platform.openai.com/docs/guides/batch (input lines {custom_id, method, url, body};
output lines {id, custom_id, response: {status_code, request_id, body}, error}).

Whatever is wrong with a line is that line's answer; the others run. Lines are read as they are needed
and answers written as they come, so that neither file need fit in memory and an interrupted run keeps
what is done.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.core.config import EngineConfig, nearest
from octavo.core.entry.async_llm import AsyncLLM
from octavo.core.entry.engine_spawn import DEFAULT_FACTORY
from octavo.core.entry.front import load_front
from octavo.core.entry.server.chat import chat_completions
from octavo.core.entry.server.completions import completions
from octavo.core.entry.server.embeddings import embeddings
from octavo.core.entry.server.errors import ApiError, as_api_error, bad_request
from octavo.core.entry.server.http import Answer, Call
from octavo.core.entry.server.responses import responses
from octavo.core.entry.server.state import ServerState

ENDPOINTS = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/embeddings": embeddings,
}


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the input. The body stays as it is: the endpoint reads it."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Label(msgspec.Struct):
    custom_id: Any = None


@dataclass(slots=True)
class BatchCounts:
    """What became of the lines, and the tokens generated."""

    completed: int = 0
    failed: int = 0
    tokens: int = 0


async def run_batch(
    config: EngineConfig,
    lines: Iterable[bytes],
    write: Callable[[bytes], None],
    *,
    on_answer: Callable[[int], None] = lambda tokens: None,
    factory: str = DEFAULT_FACTORY,
    loader: Any = load_front,
) -> BatchCounts:
    """Answers every line that is not blank, in the order in which the answers come.

    write: takes one output line with its line break. on_answer: told each answer's new tokens.
    factory, loader: as in `AsyncLLM.from_config`.

    Raises:
        ConfigError, ModelError, EngineDeadError: the model cannot be loaded.
    """
    async with AsyncLLM.from_config(config, factory=factory, loader=loader) as llm:
        names = list(dict.fromkeys((llm.model_name, config.model)))
        state = ServerState(llm, served_names=names, trust_request_chat_template=True)
        counts = BatchCounts()
        # More than can run at once, so that the engine never waits for the next line to be read.
        slots = asyncio.Semaphore(2 * llm.info.max_num_seqs + 16)
        seen: set[str] = set()

        async def one(line: bytes) -> None:
            try:
                answer, tokens = await _answer(state, line, seen)
            finally:
                slots.release()
            write(msgspec.json.encode(answer) + b"\n")
            failed = answer["error"] is not None or answer["response"]["status_code"] != 200
            counts.failed += failed
            counts.completed += not failed
            counts.tokens += tokens
            on_answer(tokens)

        async with asyncio.TaskGroup() as tasks:
            for line in lines:
                if line.strip():
                    await slots.acquire()
                    tasks.create_task(one(line))
        return counts


async def _answer(state: ServerState, line: bytes, seen: set[str]) -> tuple[dict[str, Any], int]:
    """One output line, and its new tokens."""
    result: dict[str, Any] = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": None,
        "response": None,
        "error": None,
    }
    try:
        request = _decode(line)
        result["custom_id"] = request.custom_id
        if request.custom_id in seen:
            raise bad_request(
                "custom_id", f"custom_id {request.custom_id!r} stands on another line too"
            )
        seen.add(request.custom_id)
        handler = _endpoint(request)
    except ApiError as error:  # not even a request: there is no HTTP answer to wrap
        if result["custom_id"] is None:
            result["custom_id"] = _label(line)
        result["error"] = {"code": error.code or "invalid_request", "message": error.message}
        return result, 0
    status, body, tokens = 200, b"", 0
    try:
        call = Call(bytes(request.body))
        answer = await handler(state, call)
        if isinstance(answer, bytes):
            body, tokens = answer, call.output_tokens
        else:
            await answer.aclose()
            raise bad_request("stream", "stream has no use in a batch; leave it out")
    except Exception as error:
        failure = as_api_error(error)
        status, body = failure.status, failure.body()
    result["response"] = {
        "status_code": status,
        "request_id": f"req_{uuid.uuid4().hex}",
        "body": msgspec.Raw(body),
    }
    return result, tokens


def _decode(line: bytes) -> BatchLine:
    try:
        return msgspec.json.decode(line, type=BatchLine)
    except msgspec.ValidationError as error:
        text = str(error)
        raise bad_request(None, text[:1].lower() + text[1:]) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(None, f"the line is not valid JSON: {error}", "invalid_json") from None


def _endpoint(request: BatchLine) -> Callable[[ServerState, Call], Awaitable[Answer]]:
    if request.method != "POST":
        raise bad_request("method", f"method must be POST, got {request.method!r}")
    handler = ENDPOINTS.get(request.url)
    if handler is None:
        raise bad_request(
            "url",
            f"url must be one of {', '.join(ENDPOINTS)}, got {request.url!r}"
            f"{nearest(request.url, ENDPOINTS)}",
        )
    return handler


def _label(line: bytes) -> str | None:
    """The custom_id of a line that is otherwise no request, if it has one."""
    try:
        label = msgspec.json.decode(line, type=_Label).custom_id
    except (msgspec.MsgspecError, RecursionError):
        return None
    return label if isinstance(label, str) else None
