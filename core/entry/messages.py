"""What the front process and the engine process say to each other.

A message is one msgpack-encoded struct behind a 4-byte little-endian length. The stream is a local
socket pair: no I/O thread of its own (a message library's would compete with the compute threads
for the cores), and either side learns of the other's death at once, as the end of the stream.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from octavo.core.engine import ModelInfo
from octavo.core.types import Request, SequenceUpdate

_LENGTH = struct.Struct("<I")
MAX_MESSAGE = 1 << 30
"""Bytes in one message; more is a broken stream."""


class Start(msgspec.Struct, tag=True, array_like=True):
    """The engine process's first message, on its standard input: `EngineConfig`'s fields."""

    config: dict[str, Any]


class Add(msgspec.Struct, tag=True, array_like=True):
    request: Request


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Ends whole requests (index None) or one sample of a request."""

    ids: list[tuple[str, int | None]]


class AskStats(msgspec.Struct, tag=True, array_like=True):
    token: int


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """Leave now; what still runs is dropped."""


class Progress(msgspec.Struct, tag=True, array_like=True):
    """A start-up phase: opened with its description, advanced, closed."""

    task: int
    description: str | None = None
    total: int | None = None
    advance: int = 0
    closed: bool = False


class Ready(msgspec.Struct, tag=True, array_like=True):
    info: ModelInfo


class Step(msgspec.Struct, tag=True, array_like=True):
    """Everything one engine step brought, for all requests."""

    updates: list[SequenceUpdate]


class Refused(msgspec.Struct, tag=True, array_like=True):
    """`Engine.add` refused a request: `could_never_run` tells RequestRefused from ParamError."""

    request_id: str
    param: str
    message: str
    could_never_run: bool


class Stats(msgspec.Struct, tag=True, array_like=True):
    token: int
    values: dict[str, Any]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The engine is gone. `user_error`: its configuration or model is at fault, not the engine."""

    message: str
    user_error: bool


ToEngine = Add | Abort | AskStats | Shutdown
FromEngine = Progress | Ready | Step | Refused | Stats | Failed

_encoder = msgspec.msgpack.Encoder()
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def encode(message: Start | ToEngine | FromEngine) -> bytes:
    """The message with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that `data` completes.

        Raises:
            ConnectionError: the stream is no stream of messages.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_MESSAGE:
                raise ConnectionError(f"a message of {length} bytes: the stream is broken")
            end = start + 4 + length
            if len(buffer) < end:
                break
            body = bytes(memoryview(buffer)[start + 4 : end])
            start = end
            yield body
        if start:
            del buffer[:start]
