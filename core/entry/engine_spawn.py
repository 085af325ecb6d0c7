"""Starts the engine's process. Imports nothing else of the engine: the sooner that process begins to
import torch, the sooner the model answers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

DEFAULT_FACTORY = "octavo.core.entry.wiring:build_engine"


@dataclass
class Spawned:
    """An engine process that imports what it needs and waits for its configuration.

    link: this end of the socket over which it talks.
    """

    process: subprocess.Popen[bytes]
    link: socket.socket
    taken: bool = False
    """Somebody else ends it now."""


def spawn_engine(factory: str = DEFAULT_FACTORY) -> Spawned:
    """Starts a process in which `factory` ("module:function") will build an engine."""
    # Imported before the configuration is there: the front is looking for the model meanwhile.
    preload = ("torch",) if factory == DEFAULT_FACTORY else ()
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "octavo.core.entry.engine_process"),
                *(str(theirs.fileno()), factory, *preload),
            ],
            stdin=subprocess.PIPE,
            stdout=2,  # standard error: what a library prints there is no result of ours
            pass_fds=(theirs.fileno(),),
            # It finds the modules that this process finds, and no others.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
            start_new_session=True,  # Ctrl-C reaches the parent alone
        )
    return Spawned(process, ours)


@contextlib.contextmanager
def spawned_ahead(factory: str = DEFAULT_FACTORY) -> Iterator[Spawned]:
    """As `spawn_engine`; ends the process if nobody took it over."""
    spawned = spawn_engine(factory)
    try:
        yield spawned
    finally:
        if not spawned.taken:
            spawned.process.kill()
            spawned.process.wait()
            spawned.link.close()
            if spawned.process.stdin is not None:
                spawned.process.stdin.close()
