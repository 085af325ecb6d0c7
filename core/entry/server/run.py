"""A server's life: listen at once, load, serve, drain, leave with nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.engine import ModelInfo
from octavo.core.entry.async_llm import AsyncLLM
from octavo.core.entry.engine_client import DEFAULT_FACTORY
from octavo.core.entry.front import load_front
from octavo.core.entry.server.app import build_app
from octavo.core.entry.server.state import ServerState

log = logging.getLogger("octavo.server")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What `octavo serve` takes beside `EngineConfig`. shutdown_seconds: how long requests that run
    may go on after a signal to stop; then they are aborted."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: Sequence[str] = ()
    api_key: str | None = field(default=None, repr=False)
    log_level: str = "info"
    shutdown_seconds: float = 5.0
    trust_request_chat_template: bool = False


class _Uvicorn(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again at the end, and the exit code would not be 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def serve(
    config: EngineConfig,
    options: ServerOptions,
    *,
    factory: str = DEFAULT_FACTORY,
    loader: Any = load_front,
) -> None:
    """Serves until SIGTERM or SIGINT; returns when all is closed.

    Raises:
        ConfigError, ModelError: the address or the model cannot be used.
        EngineDeadError: the engine ended while loading.
    """
    _set_up_logging(options.log_level)
    listener = _listen(options.host, options.port)
    runner: Any = asyncio
    with contextlib.suppress(ImportError):  # not on every platform
        import uvloop

        runner = uvloop
    runner.run(_Life(config, options, listener, factory, loader).run())


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    listener.setblocking(False)
    return listener


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )


class _Life:
    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        listener: socket.socket,
        factory: str,
        loader: Any,
    ) -> None:
        self._options = options
        self._listener = listener
        self._llm = AsyncLLM.from_config(config, factory=factory, loader=loader)
        self._state = ServerState(
            self._llm,
            served_names=options.served_model_name,
            api_key=options.api_key,
            trust_request_chat_template=options.trust_request_chat_template,
        )
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                build_app(self._state),
                log_config=None,
                log_level="warning",
                access_log=options.log_level == "debug",
                lifespan="off",
                http="httptools",
                ws="none",
                server_header=False,
            )
        )
        self._stop = asyncio.Event()
        self._hurry = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        started = time.monotonic()
        http = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._listener]))
        load = asyncio.ensure_future(self._llm.start())
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({http, load, stop}, return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                await load  # raises what went wrong
                print(self._banner(time.monotonic() - started), flush=True)
                await asyncio.wait({http, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            await self._close(http)

    def _on_signal(self) -> None:
        self._hurry = self._stop.is_set()  # the second one: do not wait for requests
        self._state.draining = True
        self._stop.set()

    async def _close(self, http: asyncio.Future[None]) -> None:
        """Gives open requests their time while new ones get a 503, ends them, ends the engine, and
        only then stops listening."""
        self._state.draining = True
        deadline = time.monotonic() + self._options.shutdown_seconds
        while self._llm.num_open and time.monotonic() < deadline and not self._hurry:
            await asyncio.sleep(0.02)
        await self._llm.shutdown()
        self._uvicorn.should_exit = True
        await asyncio.wait({http}, timeout=2.0)
        if not http.done():  # a client that does not take its last bytes
            self._uvicorn.force_exit = True
        await http

    def _banner(self, seconds: float) -> str:
        options = self._options
        host = f"[{options.host}]" if ":" in options.host else options.host
        port = self._listener.getsockname()[1]
        return banner(self._llm.info, self._state.names(), f"http://{host}:{port}", seconds)


def banner(info: ModelInfo, names: Sequence[str], address: str, seconds: float) -> str:
    """What is printed when a server is ready: what runs where, and why, and how long it took."""
    held = info.num_kv_blocks * info.block_size
    phases = ", ".join(f"{name} {spent:.2f}" for name, spent in info.phases.items())
    return "\n".join(
        (
            f"octavo is ready at {address}/v1",
            f"  model    {', '.join(names)}: context {info.max_model_len} tokens, {info.dtype}",
            f"  device   {info.device} ({info.device_reason})",
            f"  KV cache {info.num_kv_blocks} blocks of {info.block_size}: {held} tokens, "
            f"up to {info.max_num_seqs} sequences at once",
            f"  start-up {seconds:.2f} s ({phases})",
            *(f"  note     {note}" for note in info.notes),
        )
    )
