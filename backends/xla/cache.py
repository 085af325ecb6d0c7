"""A layer's KV cache as a value, and moving blocks of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.backends.xla import bridge
from octavo.kernels.pallas import layout

AT_ONCE = 8
"""Blocks that one call of a program moves; more take more calls of the same program."""
FORGOTTEN = 500
"""After so many other programs torch_xla may have dropped one; where it has not, noting it anew compiles nothing."""


@dataclass(slots=True)
class KV:
    """data: [blocks, words, block, width], as `kernels.pallas.layout` says; value_size: of `width`, a value's.

    A program that writes the cache takes over its memory; the handle given to it is `spent` from then on."""

    data: torch.Tensor
    kv_heads: int
    value_size: int
    spent: bool = False

    def after(self, data: torch.Tensor) -> KV:
        """The same cache once it holds `data`."""
        return KV(data, self.kv_heads, self.value_size)

    def cut(self, data: torch.Tensor) -> torch.Tensor:
        """What is to be this cache's data, by heads over the chips if they divide: a head stays on one."""
        return bridge.cut(data, axis_of_heads(self.kv_heads, 1))

    def spend(self) -> torch.Tensor:
        """The data, for a program that takes over its memory."""
        self.spent = True
        return self.data

    @property
    def block_bytes(self) -> int:
        return 4 * math.prod(self.data.shape[1:])


def axis_of_heads(kv_heads: int, axis: int) -> int | None:
    """The axis of a tensor's KV heads, where each chip can have as many of them."""
    return None if kv_heads % bridge.chips() else axis


class BlockMoves:
    """Whole blocks inside the cache, and to and from the host: three programs over all layers.

    kernel: makes an operation on device tensors of a function in jax.
    """

    def __init__(self, kernel: Callable[..., bridge.Kernel]) -> None:
        self._kernel = kernel
        self._programs: dict[Any, bridge.Captured] = {}
        self._used: dict[Any, int] = {}  # programs compiled until each was used last

    def _run(
        self,
        name: str,
        per_layer: Callable[..., torch.Tensor],
        handles: Sequence[KV],
        extra: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """per_layer(cache, layer, extra) of every layer, with the caches used up unless `name` is "export"."""
        count = len(handles)
        bridge.run_noted()  # in a program the caches are there; written op by op they are only noted
        uploaded = [bridge.upload(t) for t in extra]
        args = [*(h.data for h in handles), *uploaded]
        key = (name, *((tuple(h.data.shape), h.data.dtype) for h in handles))
        compiled = bridge.compilations()
        if compiled - self._used.get(key, -FORGOTTEN) >= FORGOTTEN:

            def move(*traced: torch.Tensor) -> list[torch.Tensor]:
                moved = (per_layer(traced[i], i, traced[count:]) for i in range(count))
                if name == "export":  # every chip gathers all of it, inside the program
                    return [bridge.cut(pages, None) for pages in moved]
                return [h.cut(data) for h, data in zip(handles, moved, strict=True)]

            donated = () if name == "export" else range(count)
            self._programs[key] = bridge.Captured(move, args, donated)
        self._used[key] = compiled
        if name != "export":
            args = [*(h.spend() for h in handles), *uploaded]
        return self._programs[key](args)

    @bridge.plain_tensors()
    def copy(self, handles: list[KV], pairs: Sequence[tuple[int, int]]) -> list[KV]:
        """`Ops.copy_blocks`."""
        kernel = self._kernel(layout.copy_pages)
        for at in range(0, len(pairs), AT_ONCE):
            some = torch.tensor(pairs[at : at + AT_ONCE], dtype=torch.int32)
            ends = torch.zeros(2, AT_ONCE, dtype=torch.int32)
            ends[:, : len(some)] = some.T
            count = torch.tensor([len(some)], dtype=torch.int32)
            after = self._run(
                "copy", lambda cache, _, x: kernel(cache, *x), handles, [*ends, count]
            )
            handles = [h.after(data) for h, data in zip(handles, after, strict=True)]
        return handles

    @bridge.plain_tensors()
    def export(self, handles: list[KV], ids: Sequence[int]) -> torch.Tensor:
        """`Ops.export_blocks`."""
        kernel = self._kernel(layout.take_pages)
        found = [torch.empty(0, sum(h.block_bytes for h in handles), dtype=torch.uint8)]
        for at in range(0, len(ids), AT_ONCE):
            some = list(ids[at : at + AT_ONCE])
            padded = torch.tensor(some + [0] * (AT_ONCE - len(some)), dtype=torch.int32)
            layers = self._run("export", lambda cache, _, x: kernel(cache, *x), handles, [padded])
            rows = [layer.cpu()[: len(some)].flatten(1).view(torch.uint8) for layer in layers]
            found.append(torch.cat(rows, dim=1))
        return torch.cat(found)

    @bridge.plain_tensors()
    def put(self, src: torch.Tensor, handles: list[KV], ids: Sequence[int]) -> list[KV]:
        """`Ops.import_blocks`."""
        kernel = self._kernel(layout.put_pages)
        for at in range(0, len(ids), AT_ONCE):
            some = list(ids[at : at + AT_ONCE])
            missing = AT_ONCE - len(some)
            beyond = [len(handles[0].data)] * missing  # places that a scatter skips
            layers, offset = [], 0
            for handle in handles:
                part = src[at : at + len(some), offset : offset + handle.block_bytes]
                pages = part.contiguous().view(handle.data.dtype)
                pages = pages.view(len(some), *handle.data.shape[1:])
                layers.append(torch.cat((pages, pages.new_zeros(missing, *pages.shape[1:]))))
                offset += handle.block_bytes
            where = torch.tensor(some + beyond, dtype=torch.int32)
            after = self._run(
                "import", lambda cache, i, x: kernel(cache, x[i], x[-1]), handles, [*layers, where]
            )
            handles = [h.after(data) for h, data in zip(handles, after, strict=True)]
        return handles
