"""Where the C++ kernels' KV cache lies, and that its memory is there before a step writes to it."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from octavo.core import huge_pages

if TYPE_CHECKING:
    from octavo.backends.cpu.ops import BoundStack

READY, READY_SHARE, SMALL = 512 << 20, 7, 512 << 20
"""Bytes for which memory is asked at the start, at most, and at most one of so many parts of what the cache has
beyond the bytes SMALL: a small one is not to take memory that it may never use."""

AHEAD, AHEAD_SHARE = 128 << 20, 16
"""The same for what lies behind the last block in use: there a thread asks while steps run, and takes from them."""

_NICE = 10  # of that thread: one of the step is not to wait up to 4 ms for its time slice to end

_PIECE = 2 << 20  # asked for at once: meanwhile nobody else maps memory
_WORTH = 16 << 20  # less is not worth a thread
_LINE = 64
_WAYS = 4096


class Region:
    """Memory for the caches of some layers, block by block: what they all keep of a block lies together.

    A sequence's next block then touches one page that is new, not one in every layer's cache, and a block
    is moved by one copy. Systems give memory at its first touch, which takes as long as many small steps:
    so a thread touches what comes next while steps run.
    """

    def __init__(self, num_blocks: int, nbytes: int) -> None:
        """nbytes: of a block of all layers."""
        stride = -(-nbytes // _LINE) * _LINE
        if stride % _WAYS == 0:  # a layer's blocks would share the same few sets of every cache
            stride += _LINE
        self.data = huge_pages.empty(num_blocks * stride).view(num_blocks, stride)
        size = self.data.nbytes
        self._asked = 0  # bytes
        self._start = min(READY, max(size - SMALL, 0) // READY_SHARE)
        self._ahead = min(AHEAD, size // AHEAD_SHARE)
        self._gives = True  # whether the system does when asked
        self._thread: threading.Thread | None = None
        self.use(0)

    def cache(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A K or V cache [blocks, …] that has the bytes from `at` on of each block."""
        typed = self.data.view(dtype)
        inner = torch.empty(shape[1:], device="meta").stride()
        offset = typed.storage_offset() + at // dtype.itemsize
        return typed.as_strided(shape, (typed.stride(0), *inner), offset)

    def use(self, block: int) -> None:
        """No block behind `block` has been written yet: sees to memory for those that come next."""
        num_blocks, stride = self.data.shape
        size = num_blocks * stride
        wanted = min(size, max(self._start, (block + 1) * stride + self._ahead))
        if not self._gives:
            return
        left = wanted - self._asked
        if left <= 0 or (left < _WORTH and wanted < size):
            return
        if self._thread is not None and self._thread.is_alive():
            return
        begin, self._asked = self._asked, wanted
        self._thread = threading.Thread(
            target=self._populate, args=(begin, wanted), name="octavo-kv-memory", daemon=True
        )
        self._thread.start()

    def _populate(self, begin: int, end: int) -> None:
        if sys.platform == "linux":  # where it is a thread's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for at in range(begin, end, _PIECE):
            if not huge_pages.populate(self.data.data_ptr() + at, min(_PIECE, end - at)):
                self._gives = False
                return


@dataclass(frozen=True, slots=True)
class CpuKV:
    """One layer's cache: k [blocks, kv_heads, head size, block], v [blocks, kv_heads, block, head size];
    int8 ones are [blocks, kv_heads, bytes]: codes, then a float32 scale per position. Of each block in
    `region` they are the bytes from begin to end: K, then V."""

    k: torch.Tensor
    v: torch.Tensor
    block_size: int
    head_size_v: int
    region: Region
    begin: int
    end: int
    # Layers bound whose first has this cache, by the id of their spec or specs. Here and not in the ops:
    # they hold weights and caches, and must go when the engine lets the cache go.
    bound: dict[int, BoundStack] = field(default_factory=dict, compare=False, repr=False)

    @property
    def block_strides(self) -> tuple[int, int]:
        """Elements from block to block of K and of V."""
        return self.k.stride(0), self.v.stride(0)


def allocate(
    layers: Sequence[int],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    block_size: int,
    head_size_v: int,
) -> dict[int, CpuKV]:
    """Caches of these K and V shapes for layers, in one region."""
    k, v = (math.prod(shape[1:]) * dtype.itemsize for shape in shapes)
    region = Region(shapes[0][0], len(layers) * (k + v))
    found = {}
    for i, layer in enumerate(layers):
        begin = i * (k + v)
        found[layer] = CpuKV(
            region.cache(begin, shapes[0], dtype),
            region.cache(begin + k, shapes[1], dtype),
            block_size,
            head_size_v,
            region,
            begin,
            begin + k + v,
        )
    return found


def pieces(handles: Sequence[CpuKV]) -> list[torch.Tensor]:
    """The handles' bytes of each block, uint8 [blocks, bytes], in order and in as few pieces as they lie
    in: layers that are neighbours are one."""
    found: list[tuple[Region, int, int]] = []
    for handle in handles:
        if found and found[-1][0] is handle.region and found[-1][2] == handle.begin:
            found[-1] = (handle.region, found[-1][1], handle.end)
        else:
            found.append((handle.region, handle.begin, handle.end))
    return [region.data[:, begin:end] for region, begin, end in found]
