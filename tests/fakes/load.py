"""Load for a server, with a client so plain that it measures the server and not itself.

As a script: `python load.py PORT --clients 64 --requests 512 --tokens 128` streams completions and
prints what came per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Reply:
    """status: 0 when the client left first."""

    status: int
    body: bytes
    first: float = 0.0

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of a stream's events; the last must be [DONE] or an error."""
        parts = [part for part in self.body.split(b"\n\n") if part]
        assert all(part.startswith(b"data: ") for part in parts), parts[-1]
        if parts[-1] == b"data: [DONE]":
            parts.pop()
        else:
            assert b'"error"' in parts[-1], parts[-1]
        return [json.loads(part[6:]) for part in parts]


async def post(
    port: int, path: str, body: bytes | dict[str, Any], *, leave_after: int | None = None
) -> Reply:
    """One request on a connection of its own. `leave_after`: hang up after so many bytes of answer."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        data = bytearray()
        first = 0.0
        while leave_after is None or len(data) < leave_after:
            part = await reader.read(1 << 16)
            if not part:
                break
            first = first or time.monotonic()
            data += part
        else:
            return Reply(0, bytes(data))
    finally:
        writer.close()
    head, _, rest = bytes(data).partition(b"\r\n\r\n")
    status = int(head.split()[1])
    return Reply(status, _unchunked(rest) if b"chunked" in head.lower() else rest, first)


def _unchunked(data: bytes) -> bytes:
    out, at = bytearray(), 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        out += data[end + 2 : end + 2 + size]
        at = end + 4 + size
    return bytes(out)


async def measure(port: int, clients: int, requests: int, tokens: int) -> dict[str, float]:
    """Streams completions; tokens and requests per second, seconds to the first byte."""
    left = requests
    firsts: list[float] = []

    async def one() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            body = {"prompt": "x", "max_tokens": tokens, "stream": True}
            began = time.monotonic()
            reply = await post(port, "/v1/completions", body)
            assert reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n"), reply.body[
                -99:
            ]
            firsts.append(reply.first - began)

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(clients)))
    seconds = time.monotonic() - began
    firsts.sort()
    return {
        "tokens_per_second": requests * tokens / seconds,
        "requests_per_second": requests / seconds,
        "first_byte_median": firsts[len(firsts) // 2],
        "first_byte_p99": firsts[int(len(firsts) * 0.99)],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    asked = parser.parse_args()
    found = asyncio.run(measure(asked.port, asked.clients, asked.requests, asked.tokens))
    print(", ".join(f"{name} {value:.4g}" for name, value in found.items()))
