"""A server with the API's streaming shape and delays that the request asks for; no engine behind it.

Beside max_tokens a body may have: first_ms and gap_ms (delays), merge (tokens in a chunk), pieces
(bytes in a write), status, error_after, break_after (chunks), no_usage, close.
`python sse_server.py PORT` serves until it is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

PROMPT_TOKENS = 7


class SseServer:
    """What it was asked is in `bodies`, the headers in `heads`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.connections = self.flying = self.most_flying = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = int(head.lower().partition("content-length:")[2].split("\r\n")[0])
                body = await reader.readexactly(length)
                self.flying += 1
                self.most_flying = max(self.most_flying, self.flying)
                try:
                    again = await self.answer(head.split()[1], body, writer)
                finally:
                    self.flying -= 1
                if not again:
                    break
        writer.close()

    async def answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if path == "/health":
            return await _whole(writer, 200, {})
        if path == "/v1/models":
            return await _whole(writer, 200, {"data": [{"id": "fake"}]})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return await _whole(writer, 404, {"error": {"message": f"no {path}"}})
        asked = json.loads(body)
        self.bodies.append(asked)
        if status := asked.get("status"):
            return await _whole(writer, status, {"error": {"message": "not to its liking"}})
        return await _stream(writer, asked, path.endswith("chat/completions"))


async def _whole(writer: asyncio.StreamWriter, status: int, body: Any) -> bool:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return True


async def _stream(writer: asyncio.StreamWriter, asked: dict[str, Any], chat: bool) -> bool:
    close = asked.get("close", False)
    extra = "Connection: close\r\n" if close else ""
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    writer.write(f"{head}{extra}\r\n".encode())

    async def event(value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        data = f": a comment\n\ndata: {text}\n\n".encode()
        size = asked.get("pieces", len(data))
        for at in range(0, len(data), size):
            piece = data[at : at + size]
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            if size < len(data):
                await asyncio.sleep(0)

    def choice(text: str, finish: str | None = None) -> dict[str, Any]:
        inner = {"delta": {"content": text} if text else {}} if chat else {"text": text}
        return {"choices": [{"index": 0, **inner, "finish_reason": finish}], "usage": None}

    if chat:
        await event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    merge, tokens = asked.get("merge", 1), asked["max_tokens"]
    for done in range(0, tokens, merge):
        await asyncio.sleep(asked.get("gap_ms" if done else "first_ms", 0) / 1e3)
        await event(choice("word " * min(merge, tokens - done)))
        if asked.get("break_after") == done:
            return False
        if asked.get("error_after") == done:
            await event({"error": {"message": "the engine is gone"}})
            break
    await event(choice("", "length"))
    if not asked.get("no_usage"):
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens}
        await event({"choices": [], "usage": usage})
    await event("[DONE]")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return not close


@contextlib.contextmanager
def in_thread() -> Iterator[tuple[SseServer, int]]:
    """A server and its port, in a thread of its own."""
    fake, loop = SseServer(), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.handle, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield fake, server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(server.close)
        for task in asyncio.all_tasks(loop):
            loop.call_soon_threadsafe(task.cancel)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _main(port: int) -> None:
    server = await asyncio.start_server(SseServer().handle, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(_main(int(sys.argv[1])))
