"""The operations that XLA needs in another form than the portable one: the KV cache, attention and the draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from octavo.backends.xla import bridge, sampling
from octavo.backends.xla.cache import KV, BlockMoves, axis_of_heads
from octavo.backends.xla.inputs import StepInputs
from octavo.core import ops as portable
from octavo.kernels.pallas import attention, layout, write
from octavo.plugins import KVSpec, Ops, PackedWeight, QuantizedTensor, SampleInputs, WeightSpec


class XlaOps(Ops):
    """The portable operations are XLA programs as they are; these are not.

    kind: what PJRT runs on, "CPU" or "TPU"; target: what kernels and layouts are for, if that is another. chips: how
    many devices every program runs on.
    """

    def __init__(self, kind: str, target: str | None = None, chips: int = 1) -> None:
        self.device = bridge.start(kind, chips=chips)
        self._tpu = (target or kind) == "TPU"
        self._kernel: Callable[..., bridge.Kernel] = cache(self._new_kernel)
        self._moves = BlockMoves(self._kernel)

    def _new_kernel(self, fn: Callable[..., Any], **settings: Any) -> bridge.Kernel:
        return bridge.Kernel(partial(fn, **settings), "tpu" if self._tpu else "cpu")

    # ---------------------------------------------------------------------------------- KV cache

    def _block_shape(self, spec: KVSpec, block_size: int) -> tuple[int, int, int]:
        words = spec.kv_heads * (2 if spec.dtype == "float32" else 1)
        size = max(spec.head_size, spec.head_size_v)
        if self._tpu:
            size = -(-size // attention.LANES) * attention.LANES
        return words, block_size, size

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        copies = bridge.chips() if axis_of_heads(spec.kv_heads, 1) is None else 1
        return copies * 4 * math.prod(self._block_shape(spec, block_size))

    @bridge.plain_tensors()
    def alloc_kv(self, groups: Sequence[KVSpec], num_blocks: int, block_size: int) -> list[KV]:
        by_layer: dict[int, KV] = {}
        for spec in groups:
            shape = (num_blocks, *self._block_shape(spec, block_size))
            dtype = torch.float32 if spec.dtype == "float32" else torch.int32
            for layer in spec.layers:
                data = torch.zeros(shape, dtype=dtype, device=self.device)
                by_layer[layer] = made = KV(data, spec.kv_heads, spec.head_size_v)
                made.cut(data)
        bridge.settle()
        handles = [by_layer[layer] for layer in sorted(by_layer)]
        # Blocks move between steps: the programs for it are built before the first.
        handles = self.copy_blocks(handles, [(0, 0)])
        return self.import_blocks(self.export_blocks(handles, [0]), handles, [0])

    def write_kv(
        self, handle: KV, k: torch.Tensor, v: torch.Tensor, meta: StepInputs, group: int = 0
    ) -> KV:
        if self._tpu:
            kernel = self._kernel(write.write_rows)
            where = [meta.tensor(f"groups.{group}.{part}") for part in ("ids", "tokens")]
        else:
            kernel, where = self._kernel(layout.scatter), [meta.tensor(f"slots.{group}")]
        heads = axis_of_heads(handle.kv_heads, 1)
        axes = [heads, heads, heads, *(None for _ in where)]
        args = [handle.data, k, v, *where]
        return handle.after(kernel.on_each(args, axes, handle.data.shape, heads))

    def kv_lost(self, handles: list[KV]) -> bool:
        return any(handle.spent for handle in handles)

    def copy_blocks(self, handles: list[KV], pairs: Sequence[tuple[int, int]]) -> list[KV]:
        return self._moves.copy(handles, pairs)

    def export_blocks(self, handles: list[KV], ids: Sequence[int]) -> torch.Tensor:
        return self._moves.export(handles, ids)

    def import_blocks(self, src: torch.Tensor, handles: list[KV], ids: Sequence[int]) -> list[KV]:
        return self._moves.put(src, handles, ids)

    # --------------------------------------------------------------------------------- attention

    def paged_attention(
        self,
        q: torch.Tensor,
        handle: KV,
        meta: StepInputs,
        *,
        scale: float,
        group: int = 0,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads = axis_of_heads(handle.kv_heads, 1)
        chips = 1 if heads is None else bridge.chips()
        tile = attention.tile_size(q.shape[1] // chips, "decode" if meta.decode else "mixed")
        kernel = self._kernel(
            attention.paged_attention,
            kv_heads=handle.kv_heads // chips,
            value_size=handle.value_size,
            scale=scale,
            window=window,
            softcap=softcap,
            body="pallas" if self._tpu else "plain",
        )
        args = [q, handle.data, meta.tensor(f"tables.{group}")]
        args += [meta.tensor(f"tiles.{tile}.{part}") for part in ("work", "rows", "row_of")]
        axes = [heads, heads, None, None, None, None]
        if sinks is not None:
            args.append(sinks)
            axes.append(axis_of_heads(handle.kv_heads, 0))
        return kernel.on_each(args, axes, (*q.shape[:2], handle.value_size), heads)

    # ------------------------------------------------------------------------ weights and the draw

    def pack_weight(
        self, parts: Mapping[str, torch.Tensor | QuantizedTensor], spec: WeightSpec, dtype: str
    ) -> PackedWeight:
        # On the host: on the device each shape of weight would be a program of its own.
        packed = portable.pack_weight("cpu", parts, spec, dtype)
        if isinstance(packed, QuantizedTensor):
            return packed.to(self.device, packed.dtype)
        return bridge.cut(packed.to(self.device), spec.shard_axis)

    def sample(self, logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        return sampling.sample(logits, rows, self._kernel)
