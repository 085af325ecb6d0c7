"""Host memory in huge pages, where the system gives them when asked: a step reads weights and KV cache from
end to end, and with pages of 4 KiB looks up an address every few dozen cache lines."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PAGE = 2 << 20
"""Bytes of a huge page where they are usual; elsewhere only how chunks are rounded."""

_ALIGNMENT = 64
_CHUNK = 16 * PAGE
"""Smaller requests share chunks of this size: a page that is touched is there as a whole."""

_POPULATE_WRITE = 23
"""madvise's MADV_POPULATE_WRITE, Linux 5.14; Python has no name for it."""

# The chunk that has room, for as long as anyone holds a part of it, and where its room begins.
_chunk: weakref.ref[mmap.mmap] | None = None
_taken = 0


def available() -> bool:
    """Whether the system can be asked for them. It may still say no, and then gives small ones."""
    return hasattr(mmap, "MADV_HUGEPAGE")


def empty(nbytes: int) -> torch.Tensor:
    """Fresh memory, uint8 [nbytes] at a multiple of 64. Not for several threads at once."""
    import torch

    if not available():
        raw = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
        start = -raw.data_ptr() % _ALIGNMENT
        return raw[start : start + nbytes]
    global _chunk, _taken
    if nbytes >= _CHUNK // 2:
        return _part(_mapped(nbytes), 0, nbytes)
    chunk = _chunk() if _chunk is not None else None
    if chunk is None or _taken + nbytes > _CHUNK:
        chunk, _taken = _mapped(_CHUNK), 0
        _chunk = weakref.ref(chunk)
    part = _part(chunk, _taken, nbytes)
    _taken += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return part


def populate(address: int, nbytes: int) -> bool:
    """Has the system give memory for these addresses now, at whole pages around them, as their first touch
    would; what they hold stays. Not under the GIL. False where the system cannot be asked."""
    if sys.platform != "linux":
        return False
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + nbytes - begin)
    return not ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), size, _POPULATE_WRITE)


class Recycled:
    """Memory for large results that come anew in every step: what no tensor lies in any longer is handed out again.
    An allocator gives such memory back each time, and the system clears every page of the next."""

    LEAST, MOST = 1 << 20, 64 << 20
    """Bytes of a tensor that is worth it; and of one that is too rare and large to be kept for the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Each with who holds it: a view that the tensor's storage keeps alive.
        self._kept: list[tuple[mmap.mmap, weakref.ref[memoryview]]] = []

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        """A float32 tensor [rows, columns] of any values."""
        import torch

        nbytes = rows * columns * 4
        if not available() or not self.LEAST <= nbytes <= self.MOST:
            return torch.empty(rows, columns)
        with self._lock:
            free = [memory for memory, holder in self._kept if holder() is None]
            fitting = [memory for memory in free if len(memory) >= nbytes + PAGE]
            if fitting:
                taken = fitting[-1]
                self._kept = [kept for kept in self._kept if kept[0] is not taken]
            else:  # what is free is too small for what is asked for now
                taken = _mapped(nbytes + nbytes // 4)
                self._kept = [kept for kept in self._kept if kept[1]() is not None]
            view = memoryview(taken)
            self._kept.append((taken, weakref.ref(view)))
        whole = torch.frombuffer(view, dtype=torch.uint8)
        start = -whole.data_ptr() % PAGE
        return whole[start : start + nbytes].view(torch.float32).view(rows, columns)


def _mapped(nbytes: int) -> mmap.mmap:
    """Anonymous memory in which `nbytes` fit behind the first multiple of a huge page."""
    found = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that has none
        found.madvise(mmap.MADV_HUGEPAGE)
    return found


def _part(memory: mmap.mmap, offset: int, nbytes: int) -> torch.Tensor:
    import torch

    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE + offset
    return whole[start : start + nbytes]
