"""The engine in a process of its own:
`python -m octavo.core.entry.engine_process <socket fd> <module:function> [module to import …]`.

Started as a module and not through multiprocessing, so that a user's script needs no
`if __name__ == "__main__"` guard and nothing of the parent is copied. The function builds the
engine; its configuration comes over standard input, which then stays open: its end means that the
parent has died, and so does this process, whatever it is doing. Requests and results go over the
socket.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import itertools
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.core.config import ConfigError, EngineConfig, prepare_thread_environment
from octavo.core.entry import messages
from octavo.core.loading.errors import ModelError
from octavo.core.params import ParamError, RequestRefused


def main() -> None:
    """Builds the engine and serves it until told to stop."""
    prepare_thread_environment()  # before anything loads torch
    gc.disable()  # until everything is there that stays
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when this process ends
    link = socket.socket(fileno=int(sys.argv[1]))
    try:
        # Imported before the configuration is there: the parent is looking for the model meanwhile.
        factory = _import_factory(sys.argv[2])
        for name in sys.argv[3:]:
            importlib.import_module(name)
        start = messages.decode_start(_read_start(_STDIN))
        threading.Thread(target=_leave_with_parent, args=(_STDIN,), daemon=True).start()
        config = EngineConfig.from_kwargs(**start.config)
        engine = factory(config, progress=_ForwardedProgress(link))
        gc.freeze()  # a full collection in the middle of a step would look through all of torch
        gc.enable()
        link.sendall(messages.encode(messages.Ready(engine.info)))
        # Model and libraries stay to the end. Looking through them for cycles takes as long as many
        # steps and would fall between two of them.
        gc.freeze()
        EngineLoop(link, engine).run()
    except ConnectionError:
        sys.exit(1)
    except BaseException as error:
        _report(link, error)
        sys.exit(1)


def _import_factory(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return factory


# The descriptor and not sys.stdin: a thread that waits in sys.stdin's lock cannot be left behind.
_STDIN = 0


def _read_start(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb", buffering=0) as stream:
        length = int.from_bytes(_exactly(stream, 4), "little")
        return _exactly(stream, length)


def _exactly(stream: io.FileIO, count: int) -> bytes:
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            raise ConnectionError("the parent left before it said what to load")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _leave_with_parent(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(1)


def _report(link: socket.socket, error: BaseException) -> None:
    user_error = isinstance(error, (ConfigError, ModelError))
    message = str(error) if user_error else f"{type(error).__name__}: {error}"
    if not user_error:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        link.sendall(messages.encode(messages.Failed(message, user_error)))


class _ForwardedTask:
    def __init__(self, link: socket.socket, number: int) -> None:
        self._link = link
        self._number = number

    def advance(self, n: int) -> None:
        self._link.sendall(messages.encode(messages.Progress(self._number, advance=n)))

    def close(self) -> None:
        self._link.sendall(messages.encode(messages.Progress(self._number, closed=True)))


class _ForwardedProgress:
    """`loading.progress.Progress`, shown by the parent."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._numbers = itertools.count()

    def task(self, description: str, total: int | None) -> _ForwardedTask:
        number = next(self._numbers)
        self._link.sendall(messages.encode(messages.Progress(number, description, total)))
        return _ForwardedTask(self._link, number)


class EngineLoop:
    """Steps the engine while it has work; reads the inbox between steps, and waits on it when idle.

    One message per step carries every request's updates.
    """

    def __init__(self, link: socket.socket, engine: Any) -> None:
        self._link = link
        self._engine = engine
        self._frames = messages.Frames()
        self._leaving = False

    def run(self) -> None:
        """Returns after `Shutdown`.

        Raises:
            ConnectionError: the parent closed its end.
        """
        engine = self._engine
        while not self._leaving:
            self._read(wait=not engine.has_unfinished())
            if not self._leaving and engine.has_unfinished() and (updates := engine.step()):
                self._send(messages.Step(updates))
        engine.shutdown()

    def _send(self, message: messages.FromEngine) -> None:
        self._link.sendall(messages.encode(message))

    def _read(self, wait: bool) -> None:
        try:
            data = self._link.recv(1 << 18, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("the parent closed its end")
        for body in self._frames.feed(data):
            self._handle(messages.decode_to_engine(body))

    def _handle(self, message: messages.ToEngine) -> None:
        if isinstance(message, messages.Add):
            self._add(message.request)
        elif isinstance(message, messages.Abort):
            updates = self._engine.abort(
                [name if index is None else (name, index) for name, index in message.ids]
            )
            if updates:
                self._send(messages.Step(updates))
        elif isinstance(message, messages.AskStats):
            values = msgspec.to_builtins(self._engine.stats())
            self._send(messages.Stats(message.token, values))
        else:
            self._leaving = True

    def _add(self, request: Any) -> None:
        try:
            self._engine.add(request)
        except ParamError as error:
            could_never_run = isinstance(error, RequestRefused)
            self._send(messages.Refused(request.id, error.param, str(error), could_never_run))


if __name__ == "__main__":
    main()
