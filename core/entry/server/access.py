"""What surrounds every request: its label, the API key, the log line, the count."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.entry.server.errors import ApiError
from octavo.core.entry.server.http import send_error

log = logging.getLogger("octavo.access")

OPEN_PATHS = ("/health", "/ping", "/version")
_PROBES = (*OPEN_PATHS, "/metrics")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class Seen:
    """What an endpoint tells of a request it served; `scope["octavo"]`. route: its path as routed."""

    route: str = "(none)"
    prompt_tokens: int | None = None
    output_tokens: int = 0


class Access:
    """The outermost layer.

    Every answer gets an `x-request-id`: the client's own, echoed, or a new one. It is a label for
    people and logs; inside, requests have ids that no client chooses. Each request is logged with it
    when it ends, probes only at level debug.
    """

    def __init__(self, app: ASGIApp, responses: Counter[tuple[str, int]]) -> None:
        self._app = app
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"")
        label = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["octavo"] = seen = Seen()
        status = 0
        started = time.monotonic()

        async def send_labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers: list[Any] = list(message.get("headers", ()))
                message["headers"] = [*headers, (b"x-request-id", label)]
            await send(message)

        try:
            await self._app(scope, receive, send_labelled)
        finally:
            status = status or 499  # nobody was there to answer
            self._responses[seen.route, status] += 1
            level = logging.DEBUG if scope["path"] in _PROBES and status < 400 else logging.INFO
            if log.isEnabledFor(level):
                self._log(level, scope, status, label, seen, time.monotonic() - started)

    @staticmethod
    def _log(
        level: int, scope: Scope, status: int, label: bytes, seen: Seen, seconds: float
    ) -> None:
        tokens = ""
        if seen.prompt_tokens is not None:
            tokens = f" {seen.prompt_tokens}+{seen.output_tokens} tokens"
        # The path as sent, still quoted: no line break of a client's gets into the log.
        path = scope.get("raw_path", b"?").decode("ascii", "backslashreplace")
        log.log(
            level,
            "%s %s %d %.0f ms%s id=%s",
            scope["method"],
            path,
            status,
            seconds * 1e3,
            tokens,
            label.decode(),
        )


class ApiKey:
    """Lets through who brings one of the keys; health and version stay open for probes."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
            # All are compared, so that the time does not tell which one was near.
            if not sum([hmac.compare_digest(given, key) for key in self._expected]):
                message = "this server needs its API key: Authorization: Bearer <key>"
                await send_error(send, ApiError(401, message, code="invalid_api_key"))
                return
        await self._app(scope, receive, send)
