"""What this machine could do at most, and where the kernels' time goes."""

from __future__ import annotations

import ctypes
import itertools
import time
from typing import TYPE_CHECKING, Final

from octavo.kernels.cpu.library import lib

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PHASES: Final = (
    "linear",
    "attention",
    "norm",
    "rotary and KV",
    "activation",
    "quantise",
    "embedding",
    "sampling",
    "waiting",
)
"""In the order of the library's counters. A fused layer quantises with the norm: that is "norm"."""

PEAKS: Final = {"float32": 0, "int8": 1}
_ROUNDS: Final = 20_000  # some tenths of a millisecond a piece
_SLICE: Final = (
    64 << 20
)  # read at a time: some milliseconds, so that one try falls between disturbances


def start_phases() -> None:
    """Sets the counters to zero and lets kernels count, until :func:`stop_phases`.

    They belong to one calling thread: with a second one at work the figures mean nothing.
    """
    lib.profile(1)


def stop_phases() -> None:
    """Kernels stop counting."""
    lib.profile(0)


def read_phases() -> dict[str, float]:
    """Seconds of each of :data:`PHASES` since :func:`start_phases`, waiting for threads included.

    Where each thread takes rows of its own through all layers, they are the calling thread's; "waiting" is
    then what it waits for the others, or helps them, when its rows are done."""
    seconds = (ctypes.c_double * len(PHASES))()
    lib.profile_read(seconds)
    return dict(zip(PHASES, seconds, strict=True))


def peak(kind: str, seconds: float = 0.3) -> float:
    """Operations a second that all threads together do in registers, the best of several tries.

    kind: "float32" (a multiply-add is two), or "int8" (by the dot product that this instruction set has).
    """
    return _best(lambda: float(lib.peak(PEAKS[kind], _ROUNDS)), seconds)


def read_bandwidth(buffer: Tensor, seconds: float = 0.5) -> float:
    """Bytes a second that all threads together read from `buffer`, the best of several tries.

    Its size, a multiple of 64 bytes, decides what is measured: memory, when it exceeds every cache.
    """
    size = buffer.numel() * buffer.element_size()
    if size % 64:
        raise ValueError(f"a buffer of {size} bytes: must be a multiple of 64")

    starts = itertools.cycle(range(0, size, _SLICE))

    def read() -> float:
        start = next(starts)
        count = min(_SLICE, size - start)
        lib.read(buffer.data_ptr() + start, count)
        return float(count)

    return _best(read, seconds)


def _best(work: Callable[[], float], seconds: float) -> float:
    best, end = 0.0, time.perf_counter() + seconds
    while (started := time.perf_counter()) < end or not best:
        done = work()
        best = max(best, done / (time.perf_counter() - started))
    return best
