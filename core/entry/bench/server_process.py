"""A server in a process of its own, for as long as a benchmark needs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.core.entry.bench.http_client import Client, TransferError
from octavo.core.entry.cli.failure import CommandFailed

HOST = "127.0.0.1"
API_KEY = "octavo-bench"
"""Given to the server, so that a key from a variable or a file cannot shut its own client out."""
OCTAVO = (sys.executable, "-m", "octavo.core.entry.cli.main")
_POLL_SECONDS = 0.005
_STOP_SECONDS = 20.0


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A server that was started. Times are `time.monotonic()` seconds.

    spawned: just before its process was. listening: when it first answered HTTP at all. ready: when
    its /health was first 200.
    """

    def __init__(self, command: Sequence[str], port: int, folder: Path) -> None:
        self.url = f"http://{HOST}:{port}/v1"
        self._log = folder / f"server-{port}.log"
        self._out = folder / f"server-{port}.out"
        self.spawned = time.monotonic()
        self.listening = self.ready = 0.0
        with self._log.open("wb") as log, self._out.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    @property
    def output(self) -> str:
        """What it has written to standard output: its banner."""
        return self._out.read_text(errors="replace")

    async def wait_ready(self, client: Client, seconds: float) -> None:
        """Polls /health until it is 200.

        Raises:
            CommandFailed: the process ended, or it was not ready in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise CommandFailed(f"the server ended with exit code {code}: {self._tail()}")
            with contextlib.suppress(TransferError):
                status, _ = await client.get("//health")
                now = time.monotonic()
                self.listening = self.listening or now
                if status == 200:
                    self.ready = now
                    return
            await asyncio.sleep(_POLL_SECONDS)
        raise CommandFailed(f"the server was not ready within {seconds:g} s: {self._tail()}")

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-5:]) or "it wrote nothing to standard error"

    def stop(self) -> None:
        """Ends it, by force if it does not leave by itself."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def serve_command(arguments: Sequence[str], port: int) -> list[str]:
    """`octavo serve` on a port of this machine, with `arguments` as a user would give them."""
    address = ["--host", HOST, "--port", str(port), "--api-key", API_KEY]
    return [*OCTAVO, "serve", *arguments, *address]


@contextlib.contextmanager
def started(arguments: Sequence[str]) -> Iterator[ServerProcess]:
    """A server process that is ended when the block is left."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        server = ServerProcess(serve_command(arguments, port), port, Path(folder))
        try:
            yield server
        finally:
            server.stop()


async def served_model(client: Client) -> str:
    """The first model that the API lists.

    Raises:
        CommandFailed: there is none.
    """
    try:
        status, body = await client.get("/models")
        name = json.loads(body)["data"][0]["id"] if status == 200 else None
    except (TransferError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CommandFailed(f"the server does not list its models: {error}") from None
    if not isinstance(name, str):
        text = body.decode(errors="replace")[:300]
        raise CommandFailed(f"the server does not list its models: HTTP {status}: {text}")
    return name
