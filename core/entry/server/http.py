"""The thin layer between ASGI and the endpoints: bodies in, JSON or server-sent events out.

A client that goes away ends its request: while an answer is being made, another task watches the
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from starlette.types import Message, Receive, Scope, Send

from octavo.core.entry.server.errors import ApiError, as_api_error

log = logging.getLogger("octavo.server")

Answer = bytes | AsyncGenerator[bytes, None]


@dataclass(slots=True)
class Call:
    """One request on its way through its handler, which may set the rest.

    headers: of the answer. prompt_tokens, output_tokens: for the log, None where there are none.
    """

    body: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int = 0


Handler = Callable[[Call], Awaitable[Answer]]

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that buffers would undo streaming
]


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def send_json(
    send: Send, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """One whole answer."""
    length = (b"content-length", str(len(body)).encode())
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*_JSON, length, *(headers or [])],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """An error as a whole answer."""
    await send_json(send, error.body(), error.status, error_headers(error))


def error_headers(error: ApiError) -> list[tuple[bytes, bytes]]:
    """When to come back, or what to bring."""
    if error.status in (429, 503):
        return [(b"retry-after", b"1" if error.status == 429 else b"2")]
    return [(b"www-authenticate", b"Bearer")] if error.status == 401 else []


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request's body.

    Raises:
        ApiError: a 413 when it has more than `limit` bytes.
        ClientGone: it never came whole.
    """
    refused = ApiError(413, f"the body is larger than {limit} bytes", code="too_large")
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise refused
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise refused
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


class Endpoint:
    """An ASGI app around a handler that takes the call and returns JSON or an event stream.

    A handler's error before its first event is an ordinary HTTP error; a later one ends the stream
    with an error event.
    """

    def __init__(self, route: str, handler: Handler, body_limit: int) -> None:
        self._route = route
        self._handler = handler
        self._limit = body_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = scope["octavo"]
        seen.route = self._route
        try:
            call = Call(await read_body(scope, receive, self._limit))
        except ClientGone:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        work = asyncio.ensure_future(self._answer(call, send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            work.cancel()  # nothing happens to one that is done
            with contextlib.suppress(asyncio.CancelledError):
                await work
            seen.prompt_tokens, seen.output_tokens = call.prompt_tokens, call.output_tokens

    async def _answer(self, call: Call, send: Send) -> None:
        try:
            answer = await self._handler(call)
            first = None if isinstance(answer, bytes) else await anext(answer)
        except Exception as error:
            await send_error(send, _reported(error))
            return
        if isinstance(answer, bytes):
            await send_json(send, answer, headers=call.headers)
            return
        headers = [*_EVENTS, *call.headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await send(_part(first or b""))
            async for events in answer:
                await send(_part(events))
        except Exception as error:
            await send(_part(b"data: " + _reported(error).body() + b"\n\n"))
        finally:
            with contextlib.suppress(Exception):
                await answer.aclose()
        await send({"type": "http.response.body", "body": b""})


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def _reported(error: Exception) -> ApiError:
    result = as_api_error(error)
    if result.status == 500:
        log.error("a request failed", exc_info=error)
    return result


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
