"""A client for streaming completions that costs next to nothing, so that it is not what is measured.

One asyncio protocol per connection: the time of a piece is taken the moment it arrives, and
httptools' C parser (which the server uses too) takes HTTP apart. A general client hands each chunk
through several layers of streams and takes four times the CPU time for it; docs/performance.md has the
figures.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from octavo.core.config import ConfigError

OnEvent = Callable[[float, bytes], None]
"""Told each server-sent event: `time.perf_counter()` when it arrived, and its data."""


class TransferError(Exception):
    """A request that failed. `kind` is short and the same for all failures of one sort."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Address:
    """Where an OpenAI-compatible API lives. `path` is what stands before /chat/completions."""

    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """http://host:port, with or without /v1 or another path; without any path it is /v1.

        Raises:
            ConfigError: no such URL.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"--url must be as http://127.0.0.1:8000/v1, got {url!r}")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/") or "/v1"
        return cls(parts.hostname, port or (443 if tls else 80), tls, path)


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, lost: Callable[[_Connection], None]) -> None:
        self._lost = lost
        self._transport: Any = None
        self._done: asyncio.Future[int] | None = None
        self._parser: Any = None
        self._on_event: OnEvent | None = None
        self._rest = b""  # of the body: what no event was made of yet
        self._status = 0
        self._now = 0.0
        self.answered = False  # something came back
        self.reusable = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # uvloop's is no asyncio.Transport by type

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._done.done():
            self.close()  # nobody asked
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("bad answer", f"the answer is not HTTP: {error}")

    def eof_received(self) -> None:
        return None  # which closes

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(self)
        self._fail("connection lost", f"the connection was closed: {error or 'by the server'}")

    # httptools

    def on_status(self, status: bytes) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._rest += body
        if self._status != 200 or self._on_event is None:
            return
        # Events end with an empty line; a piece of the body may hold several, or part of one.
        *events, self._rest = self._rest.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._on_event(self._now, line[5:].strip())

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._status)

    # for Client

    async def exchange(self, request: bytes, on_event: OnEvent | None) -> tuple[int, bytes]:
        """Sends a request; returns the status and what of the body is no event."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._on_event, self._rest, self._status = on_event, b"", 0
        self.answered = self.reusable = False
        self._done = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._fail("connection lost", "the server closed the connection")
        self._transport.write(request)
        try:
            return await self._done, self._rest
        finally:
            if not self.reusable:
                self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _fail(self, kind: str, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(TransferError(kind, message))


class Client:
    """Requests to one API, over as many connections as are needed; they are kept and used again, as
    an application's client does.

    Args:
        url: see `Address.parse`.
        api_key: sent as a bearer token.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.address = Address.parse(url)
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if self.address.tls else None
        host = self.address.host
        lines = [
            f"Host: {f'[{host}]' if ':' in host else host}:{self.address.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream, application/json",
        ]
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise ConfigError("--api-key must be printable ASCII")
            lines.append(f"Authorization: Bearer {api_key}")
        self._headers = "\r\n".join(lines)

    async def post(self, path: str, body: bytes, on_event: OnEvent) -> None:
        """Posts JSON to the API's `path` and passes on the events of the answer.

        Raises:
            TransferError: no connection, a status other than 200, or a connection lost midway.
        """
        status, rest = await self._request("POST", self.address.path + path, body, on_event)
        if status != 200:
            text = " ".join(rest.decode(errors="replace").split())
            raise TransferError(f"HTTP {status}", f"HTTP {status}: {text[:300]}")

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a path below the API's; one that starts with // is the host's own.

        Raises:
            TransferError: no connection.
        """
        whole = path[1:] if path.startswith("//") else self.address.path + path
        return await self._request("GET", whole, b"", None)

    async def _request(
        self, method: str, path: str, body: bytes, on_event: OnEvent | None
    ) -> tuple[int, bytes]:
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}\r\nContent-Length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        while True:
            fresh = not self._idle
            connection = await self._connect() if fresh else self._idle.pop()
            try:
                found = await connection.exchange(request, on_event)
            except TransferError:
                if fresh or connection.answered:
                    raise
                continue  # the server closed it while it was idle, without having seen the request
            if connection.reusable:
                self._idle.append(connection)
            return found

    async def _connect(self) -> _Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self._forget),
                self.address.host,
                self.address.port,
                ssl=self._tls,
            )
        except OSError as error:
            raise TransferError(
                "no connection",
                f"no connection to {self.address.host}:{self.address.port}: {error}",
            ) from None
        return connection

    def _forget(self, connection: _Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Closes what is open and idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
