"""Whole KV blocks of all layers in one launch: inside the cache, and to and from one contiguous buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.runtime import launch
from octavo.kernels.triton.tiles import tile
from octavo.kernels.triton.variants import Variant

if TYPE_CHECKING:
    import torch

WORD = 4
"""Bytes of the words that are moved; a block of every cache is a whole number of them."""


@triton.jit
def _base(addresses, cache):
    """The first word of a cache whose address stands in memory. Caches begin at multiples of 16 bytes."""
    return tl.multiple_of(tl.load(addresses + cache).to(tl.pointer_type(tl.int32)), 4)


@triton.jit
def copy_kernel(addresses, sizes, pairs, WORDS: tl.constexpr):
    """Grid: (pairs, caches, chunks of WORDS). addresses int64 and sizes int64 (words of a block) of each
    cache; pairs [P, 2] int64: source and destination block."""
    cache = tl.program_id(1)
    size = tl.load(sizes + cache)
    at = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    base = _base(addresses, cache)
    source = tl.load(pairs + 2 * tl.program_id(0)) * size
    target = tl.load(pairs + 2 * tl.program_id(0) + 1) * size
    tl.store(base + target + at, tl.load(base + source + at, mask=at < size), mask=at < size)


@triton.jit
def pack_kernel(
    addresses, sizes, offsets, blocks, buffer, row, WORDS: tl.constexpr, OUT: tl.constexpr
):
    """Grid: (blocks, caches, chunks of WORDS). Between caches and buffer int32 [blocks, row]: `OUT` packs
    blocks into it, else they are put back. offsets int64: where in a row each cache's words begin."""
    cache = tl.program_id(1)
    size = tl.load(sizes + cache)
    at = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    inside = _base(addresses, cache) + tl.load(blocks + tl.program_id(0)) * size + at
    outside = buffer + tl.program_id(0).to(tl.int64) * row + tl.load(offsets + cache) + at
    if OUT:
        tl.store(outside, tl.load(inside, mask=at < size), mask=at < size)
    else:
        tl.store(inside, tl.load(outside, mask=at < size), mask=at < size)


@dataclass(frozen=True)
class Caches:
    """Caches [blocks, …] of one device as the kernels want them: addresses, words of a block and where
    they begin in a packed row, int64 [caches] each on the device."""

    tensors: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    sizes: torch.Tensor
    offsets: torch.Tensor
    row: int  # words of all caches' parts of one block
    largest: int

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Caches:
        """Raises ValueError for a cache whose blocks are not whole words."""
        import torch

        sizes = [t[0].numel() * t.element_size() for t in tensors]
        if any(size % WORD for size in sizes):
            raise ValueError(f"KV blocks of {sizes} bytes: each must be a multiple of {WORD}")
        words = [size // WORD for size in sizes]

        def up(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=tensors[0].device)

        return Caches(
            tensors=tuple(tensors),
            addresses=up([t.data_ptr() for t in tensors]),
            sizes=up(words),
            offsets=up([sum(words[:i]) for i in range(len(words))]),
            row=sum(words),
            largest=max(words),
        )

    def grid(self, blocks: int, words: int) -> tuple[int, int, int]:
        return blocks, len(self.tensors), -(-self.largest // words)


def copy(caches: Caches, pairs: Sequence[tuple[int, int]], arch: str) -> None:
    """Copies block a to block b in every cache, for (a, b) in order."""
    import torch

    tiled = tile("copy_blocks", arch, 0, "float32")
    for together in rounds(pairs):
        on_device = torch.tensor(together, dtype=torch.int64, device=caches.sizes.device)
        launch(
            copy_kernel,
            caches.grid(len(together), tiled.block_n),
            *(caches.addresses, caches.sizes, on_device),
            tile=tiled,
            WORDS=tiled.block_n,
        )


def rounds(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Pairs cut, in order, where one touches a block that an earlier one of its round writes, or writes
    one that it reads: programs of one launch run in any order."""
    out: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if not out or source in written or target in written or target in read:
            out.append([])
            read, written = set(), set()
        out[-1].append((source, target))
        read.add(source)
        written.add(target)
    return out


def pack(caches: Caches, blocks: torch.Tensor, buffer: torch.Tensor, arch: str) -> None:
    """Copies blocks (int64 ids on the device) of every cache to buffer int32 [blocks, caches.row]."""
    _pack(caches, blocks, buffer, arch, True)


def unpack(caches: Caches, blocks: torch.Tensor, buffer: torch.Tensor, arch: str) -> None:
    """The inverse of `pack`."""
    _pack(caches, blocks, buffer, arch, False)


def _pack(caches: Caches, blocks: torch.Tensor, buffer: torch.Tensor, arch: str, out: bool) -> None:
    tiled = tile("copy_blocks", arch, 0, "float32")
    launch(
        pack_kernel,
        caches.grid(blocks.shape[0], tiled.block_n),
        *(caches.addresses, caches.sizes, caches.offsets, blocks, buffer, caches.row),
        tile=tiled,
        WORDS=tiled.block_n,
        OUT=out,
    )


def _variant(name: str, out: bool | None) -> Variant:
    words = {"addresses": "*i64", "sizes": "*i64"}
    moved = {"offsets": "*i64", "blocks": "*i64", "buffer": "*i32", "row": "i32"}
    block_n = {
        "tiled": {"WORDS": "block_n"},
        "tile": lambda a: tile("copy_blocks", a, 0, "float32"),
    }
    if out is None:
        return Variant(name, copy_kernel, {**words, "pairs": "*i64"}, {}, **block_n)  # type: ignore[arg-type]
    return Variant(name, pack_kernel, {**words, **moved}, {"OUT": out}, **block_n)  # type: ignore[arg-type]


AOT: list[Variant] = [
    _variant("copy_blocks", None),
    _variant("export_blocks", True),
    _variant("import_blocks", False),
]
