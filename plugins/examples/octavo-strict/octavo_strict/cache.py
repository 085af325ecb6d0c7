"""A layer's KV cache: its layout, its handles, and what is known of every slot.

One tensor [blocks, width] holds everything. A block has its keys transposed [heads, K, 128], so that a
query meets contiguous numbers, and its values [heads, 128, V] behind them; K and V are the head sizes
rounded up to a tile of 16. A new cache is NaN.

Beside the numbers stands what the chip holds against whoever drives it: which slots were written since
their block began anew, when a block was last read, how often it was written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.plugins import KVSpec
from octavo_strict.chip import (
    BLOCK,
    CHIP,
    POLLS,
    RESTS,
    BoundsError,
    DonatedError,
    RestError,
    StrictError,
)

TILE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def padded(size: int) -> int:
    """A head size as the cache holds it."""
    return -(-size // TILE) * TILE


def block_width(spec: KVSpec) -> int:
    """Numbers in a block of one layer."""
    return BLOCK * spec.kv_heads * (padded(spec.head_size) + padded(spec.head_size_v))


class Layer:
    """The cache of one layer, `blocks` blocks of it.

    Attributes:
        data: [blocks, width].
        keys, values: views of it, [blocks, heads, K, 128] and [blocks, heads, 128, V].
        written: [blocks, 128], the slots that hold something of their block's present use.
        read_at: [blocks], the step in which each was last read.
        version: [blocks], how often each was written.
    """

    def __init__(self, spec: KVSpec, blocks: int) -> None:
        self.spec, self.blocks = spec, blocks
        kind = DTYPES[spec.dtype]
        self.data = torch.full((blocks, block_width(spec)), float("nan"), dtype=kind)
        heads, k, v = spec.kv_heads, padded(spec.head_size), padded(spec.head_size_v)
        self.keys = self.data[:, : heads * k * BLOCK].view(blocks, heads, k, BLOCK)
        self.values = self.data[:, heads * k * BLOCK :].view(blocks, heads, BLOCK, v)
        self.written = torch.zeros(blocks, BLOCK, dtype=torch.bool)
        self.read_at = torch.full((blocks,), -RESTS - 1)
        self.version = torch.zeros(blocks, dtype=torch.int64)

    def check(self, blocks: torch.Tensor, what: str) -> None:
        """Raises BoundsError unless all of these are blocks."""
        bad = blocks[(blocks < 0) | (blocks >= self.blocks)]
        if len(bad):
            raise BoundsError(
                f"{what} names blocks {sorted(set(bad.tolist()))}; there are 0 to {self.blocks - 1}"
            )

    def begin(self, blocks: torch.Tensor, step: int, what: str) -> None:
        """Blocks begin anew. Raises RestError while the device may still read them for another."""
        at = self.read_at[blocks]
        busy = blocks[(at > CHIP.quiet) & (step - at <= RESTS)]
        if len(busy):
            raise RestError(
                f"{what} writes blocks {busy.tolist()} in step {step}; they were read in steps "
                f"{self.read_at[busy].tolist()} and may be for {RESTS} steps more"
            )
        self.written[blocks] = False

    def changed(self, blocks: torch.Tensor) -> None:
        """Notes that these were written."""
        self.version[blocks] += 1


class Handle:
    """A layer's cache as the engine holds it. An operation that writes takes what it holds."""

    __slots__ = ("_layer",)

    def __init__(self, layer: Layer) -> None:
        self._layer: Layer | None = layer

    @property
    def lost(self) -> bool:
        """Whether it was given away."""
        return self._layer is None

    def look(self) -> Layer:
        """The cache, to read from."""
        if self._layer is None:
            raise DonatedError("a KV handle was used that an operation had been given")
        return self._layer

    def take(self) -> Layer:
        """The cache, to write to: this handle is worth nothing from now on."""
        layer = self.look()
        self._layer = None
        return layer


class LateCopy:
    """Blocks on their way to the host: read when it ends, so whoever wrote them meanwhile is found."""

    def __init__(self, layers: Sequence[Layer], ids: Sequence[int]) -> None:
        self._layers = layers
        self._ids = torch.tensor(list(ids), dtype=torch.int64)
        for layer in layers:
            layer.check(self._ids, "export_blocks")
        self._versions = [layer.version[self._ids] for layer in layers]
        self._polls = 0
        self._found: torch.Tensor | None = None

    def done(self) -> bool:
        """Whether the copy has ended: not when first asked."""
        self._polls += 1
        if self._polls > POLLS:
            self.wait()
        return self._found is not None

    def wait(self) -> torch.Tensor:
        """The blocks [count, bytes] of uint8.

        Raises:
            StrictError: one was written meanwhile.
        """
        if self._found is None:
            for layer, before in zip(self._layers, self._versions, strict=True):
                bad = self._ids[layer.version[self._ids] != before]
                if len(bad):
                    raise StrictError(
                        f"blocks {bad.tolist()} were written while they were copied out"
                    )
            rows = [layer.data[self._ids].view(torch.uint8) for layer in self._layers]
            self._found = torch.cat(rows, dim=1)
        return self._found
