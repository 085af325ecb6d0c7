"""Other processes that keep cores busy, as neighbours on a shared machine do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_SPIN = """
import os, sys
parent = os.getppid()
print("spinning", flush=True)
while os.getppid() == parent:  # a parent that was killed leaves nobody spinning
    for _ in range(100_000):
        pass
"""


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """`count` processes that compute without pause meanwhile, at the usual priority.

    Raises:
        RuntimeError: one of them did not start.
    """
    with ExitStack() as stack:
        for _ in range(count):
            child = subprocess.Popen(
                [sys.executable, "-S", "-c", _SPIN], stdout=subprocess.PIPE, text=True
            )
            stack.callback(_end, child)
            assert child.stdout is not None
            if child.stdout.readline() != "spinning\n":
                raise RuntimeError("a process that should keep a core busy did not start")
        time.sleep(0.2)  # until the system has spread them
        yield


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()
