"""The thin layer between ASGI and the endpoints: bodies in, JSON or server-sent events out.

A client that goes away ends its request: while an answer is being made, another task watches the
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.entry.server.errors import ApiError, as_api_error

log = logging.getLogger("octavo.server")

Answer = bytes | AsyncGenerator[bytes, None]
Handler = Callable[[bytes], Awaitable[Answer]]

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that buffers would undo streaming
]
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


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
    if error.status == 503:
        return [(b"retry-after", b"2")]
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
    """An ASGI app around a handler that takes the body and returns JSON or an event stream.

    A handler's error before its first event is an ordinary HTTP error; a later one ends the stream
    with an error event.
    """

    def __init__(self, handler: Handler, body_limit: int) -> None:
        self._handler = handler
        self._limit = body_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, self._limit)
        except ClientGone:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        work = asyncio.ensure_future(self._answer(body, send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            work.cancel()  # nothing happens to one that is done
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _answer(self, body: bytes, send: Send) -> None:
        try:
            answer = await self._handler(body)
            first = None if isinstance(answer, bytes) else await anext(answer)
        except Exception as error:
            await send_error(send, _reported(error))
            return
        if isinstance(answer, bytes):
            await send_json(send, answer)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
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


class RequestIds:
    """Gives every answer an `x-request-id`: the client's own, echoed, or a new one. It is a label for
    people and logs; inside, requests have ids that no client chooses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"")
        label = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers: list[Any] = list(message.get("headers", ()))
                message["headers"] = [*headers, (b"x-request-id", label)]
            await send(message)

        await self._app(scope, receive, send_labelled)
