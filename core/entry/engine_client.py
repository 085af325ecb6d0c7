"""The front's end of the engine process: starts it, talks to it, notices its death.

Imports no torch. Everything here runs on one event loop; what the engine says is handed to a
listener in the order in which it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from typing import Any, Protocol, cast

from octavo.core.config import ConfigError
from octavo.core.engine import ModelInfo
from octavo.core.entry import messages
from octavo.core.entry.engine_spawn import DEFAULT_FACTORY, Spawned, spawn_engine
from octavo.core.loading.progress import Progress, Task

_EXIT_SECONDS = 5.0


class EngineDeadError(RuntimeError):
    """The engine process has ended; no request can be served any more. `expected`: it was told to."""

    expected = False


class Listener(Protocol):
    """Who receives what the engine says."""

    def on_message(self, message: messages.FromEngine) -> None: ...

    def on_death(self, error: EngineDeadError) -> None: ...


class EngineClient(asyncio.Protocol):
    """One engine process. `launch()` at once, `load()` when the configuration is known.

    spawned: the process, where it was started before.
    """

    def __init__(
        self,
        listener: Listener,
        factory: str = DEFAULT_FACTORY,
        spawned: Spawned | None = None,
    ) -> None:
        self._listener = listener
        self._factory = factory
        self._spawned = spawned
        self._frames = messages.Frames()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[ModelInfo] | None = None
        self._progress: Progress | None = None
        self._tasks: dict[int, Task] = {}
        self._failure: messages.Failed | None = None
        self._closing = False
        self.death: EngineDeadError | None = None

    @property
    def pid(self) -> int | None:
        """The engine process's id, once launched."""
        return self._process.pid if self._process else None

    async def launch(self) -> None:
        """Starts the process, or takes it over. It imports what it needs and waits for `load`."""
        spawned = self._spawned or spawn_engine(self._factory)
        spawned.taken = True
        self._process = spawned.process
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        spawned.link.setblocking(False)
        await loop.create_unix_connection(lambda: self, sock=spawned.link)

    async def load(self, config: dict[str, Any], progress: Progress | None) -> ModelInfo:
        """Sends the configuration and waits until the engine can take requests.

        Raises:
            ConfigError: the configuration or the model cannot be used.
            EngineDeadError: the process ended before it was ready.
        """
        assert self._process is not None and self._process.stdin is not None and self._ready
        self._progress = progress
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(messages.encode(messages.Start(config)))
            self._process.stdin.flush()
        return await asyncio.shield(self._ready)

    def send(self, message: messages.ToEngine) -> None:
        """Queues a message; never blocks.

        Raises:
            EngineDeadError: there is no engine any more.
        """
        if self.death is not None:
            raise self.death
        assert self._transport is not None
        self._transport.write(messages.encode(message))

    async def close(self) -> None:
        """Ends the process: by asking, then by force. Can be called twice."""
        self._closing = True
        process = self._process
        if process is None:
            return
        if self._transport is not None and self.death is None:
            self._transport.write(messages.encode(messages.Shutdown()))
        if self._ready is not None and not self._ready.done():
            process.kill()  # it is still loading and reads no messages
            self._ready.cancel()
        try:
            await asyncio.to_thread(process.wait, _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        """Bytes from the engine."""
        for body in self._frames.feed(data):
            self._handle(messages.decode_from_engine(body))

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine closed its end: it is dying or dead."""
        self._die()

    def _handle(self, message: messages.FromEngine) -> None:
        if isinstance(message, messages.Ready):
            assert self._ready is not None
            if not self._ready.done():
                self._ready.set_result(message.info)
        elif isinstance(message, messages.Progress):
            self._show(message)
        elif isinstance(message, messages.Failed):
            self._failure = message
        else:
            self._listener.on_message(message)

    def _show(self, message: messages.Progress) -> None:
        if self._progress is None:
            return
        if message.description is not None:
            shown = self._progress.task(message.description, message.total)
            self._tasks[message.task] = shown
        elif task := self._tasks.get(message.task):
            if message.advance:
                task.advance(message.advance)
            if message.closed:
                task.close()

    def _die(self) -> None:
        failure = self._failure
        if self._closing:
            message = "the engine was shut down"
        elif failure is not None:
            message = f"the engine failed: {failure.message}"
        else:
            message = f"the engine process ended unexpectedly{self._exit_words()}"
        self.death = EngineDeadError(message)
        self.death.expected = self._closing
        if self._ready is not None and not self._ready.done():
            if failure is not None and failure.user_error:
                self._ready.set_exception(ConfigError(failure.message))
            else:
                self._ready.set_exception(self.death)
            self._ready.exception()  # read here: nobody may be waiting
        self._listener.on_death(self.death)

    def _exit_words(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            return ""
        if code == -signal.SIGKILL:
            return " (signal 9: somebody killed it, or the machine had no memory left)"
        return f" (signal {-code})" if code < 0 else f" (exit code {code})"
