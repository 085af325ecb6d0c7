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
from octavo.core.entry.cli.sizes import size_text
from octavo.core.entry.engine_spawn import DEFAULT_FACTORY, Spawned
from octavo.core.entry.formats import check_names
from octavo.core.entry.front import load_front
from octavo.core.entry.server.app import build_app
from octavo.core.entry.server.listen import Protocol, check_tls, leave, listen, listen_at
from octavo.core.entry.server.state import ServerState

log = logging.getLogger("octavo.server")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What `octavo serve` takes beside `EngineConfig`.

    uds: path of a Unix socket to listen at, instead of host and port. shutdown_seconds: how long
    requests that run may go on after a signal to stop; then they are aborted. max_queue, lenient,
    stall_seconds: see `ServerState`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    served_model_name: Sequence[str] = ()
    api_keys: Sequence[str] = field(default=(), repr=False)
    allowed_origins: Sequence[str] = ()
    allow_credentials: bool = False
    log_level: str = "info"
    max_queue: int | None = None
    lenient: bool = False
    stall_seconds: float = 120.0
    shutdown_seconds: float = 5.0
    trust_request_chat_template: bool = False
    tool_call_parser: str = "auto"
    fallback_tool_prompt: bool = False
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        if self.max_queue is not None and self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1, got {self.max_queue}")
        for name in ("stall_seconds", "shutdown_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        check_names(self.tool_call_parser, self.reasoning_parser)
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("allow_credentials needs allowed_origins by name, not *")


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
    spawned: Spawned | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; returns when all is closed.

    spawned: the engine's process, if it was started before.

    Raises:
        ConfigError, ModelError: the address or the model cannot be used.
        EngineDeadError: the engine ended without being told to. Open requests have got an error.
    """
    _set_up_logging(options.log_level)
    check_tls(options.ssl_certfile, options.ssl_keyfile)
    listener = listen_at(options.uds) if options.uds else listen(options.host, options.port)
    runner: Any = asyncio
    with contextlib.suppress(ImportError):  # not on every platform
        import uvloop

        runner = uvloop
    try:
        runner.run(_Life(config, options, listener, factory, loader, spawned).run())
    finally:
        leave(options.uds)


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
        spawned: Spawned | None,
    ) -> None:
        self._options = options
        self._listener = listener
        self._llm = AsyncLLM.from_config(config, factory=factory, loader=loader, spawned=spawned)
        self._state = ServerState(
            self._llm,
            served_names=options.served_model_name,
            api_keys=options.api_keys,
            allowed_origins=options.allowed_origins,
            allow_credentials=options.allow_credentials,
            max_queue=options.max_queue,
            lenient=options.lenient,
            stall_seconds=options.stall_seconds,
            trust_request_chat_template=options.trust_request_chat_template,
            tool_call_parser=options.tool_call_parser,
            fallback_tool_prompt=options.fallback_tool_prompt,
            reasoning_parser=options.reasoning_parser,
        )
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                build_app(self._state),
                log_config=None,
                log_level="warning",
                access_log=False,  # the app keeps its own
                lifespan="off",
                http=Protocol,
                ws="none",
                server_header=False,
                proxy_headers=False,  # nothing here looks at the client's address
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
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
        ended = asyncio.ensure_future(self._llm.ended.wait())
        watch = asyncio.ensure_future(self._watch(load))
        try:
            await asyncio.wait({http, load, stop}, return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                await load  # raises what went wrong
                print(self._banner(time.monotonic() - started), flush=True)
                await asyncio.wait({http, stop, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stop, ended, watch, load):
                task.cancel()
            await asyncio.gather(load, watch, return_exceptions=True)
            await self._close(http)
        if self._llm.ended.is_set():
            self._llm.check_health()  # raises why

    async def _watch(self, load: asyncio.Future[None]) -> None:
        """Knows soon when the engine hangs."""
        seconds = self._options.stall_seconds
        if seconds:
            await asyncio.wait({load})
            await self._llm.watch(min(5.0, seconds / 4))

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
        scheme = "https" if options.ssl_certfile else "http"
        host = f"[{options.host}]" if ":" in options.host else options.host
        if options.uds:
            address = f"{scheme}+unix://{options.uds}"
        else:
            address = f"{scheme}://{host}:{self._listener.getsockname()[1]}"
        notes = self._state.formats.notes
        return banner(self._llm.info, self._state.names(), address, seconds, notes)


def banner(
    info: ModelInfo,
    names: Sequence[str],
    address: str,
    seconds: float,
    notes: Sequence[str] = (),
) -> str:
    """What is printed when a server is ready: what runs where, and why, and how long it took."""
    held = info.num_kv_blocks * info.block_size
    phases = ", ".join(f"{name} {spent:.2f}" for name, spent in info.phases.items())
    return "\n".join(
        (
            f"octavo is ready at {address}/v1",
            f"  model    {', '.join(names)}: context {info.max_model_len} tokens, {info.numbers}",
            f"  device   {info.device} ({info.device_reason})",
            f"  KV cache {info.num_kv_blocks} blocks of {info.block_size}: {held} tokens in {info.kv_dtype}, "
            f"up to {info.max_num_seqs} sequences at once",
            *_swap_line(info),
            f"  start-up {seconds:.2f} s ({phases})",
            *(f"  note     {note}" for note in (*info.notes, *notes)),
        )
    )


def _swap_line(info: ModelInfo) -> list[str]:
    if not info.host_blocks:
        return []
    return [
        f"  swap     {info.host_blocks} blocks in {size_text(info.host_bytes)} of host memory, "
        f"preemption by {info.preemption_mode}"
    ]
