"""The ops that the C++ kernels run. A layer's KV handle is a `CpuKV`; what a kernel needs of a step is
described once, at the first layer, and kept in the step's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from octavo.core.ops import DTYPES, TorchInputs
from octavo.kernels import cpu as lib
from octavo.plugins import KVSpec, Ops, SampleInputs, WeightSpec


@dataclass(frozen=True, slots=True)
class CpuKV:
    """One layer's cache: k [blocks, kv_heads, head size, block], v [blocks, kv_heads, block, head size]."""

    k: torch.Tensor
    v: torch.Tensor


@cache
def _layer(scale: float, window: int, softcap: float) -> Any:
    return lib.AttentionLayer(scale, window=window, softcap=softcap)


def _steps(meta: TorchInputs) -> dict[Any, Any]:
    if meta.extra is None:
        meta.extra = {}
    steps: dict[Any, Any] = meta.extra
    return steps


TILE = 32
"""Rows of a matrix product in batch-invariant mode."""


def packs_weights() -> bool:
    """Whether oneDNN is there to lay out weights for its matrix products."""
    built = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return built and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class CpuOps(Ops):
    """C++ kernels where they exist, torch elsewhere.

    Args:
        packed_dtypes: dtypes in which linear weights take oneDNN's blocked layout. Against torch's
            `F.linear` its products are up to four times as fast at 2 to 32 rows, and faster at all.
        batch_invariant: cut every product into tiles of `TILE` rows, padded, so that a row is computed
            by the same instructions whatever shares its step. The other kernels are so by themselves.
    """

    device = "cpu"

    def __init__(self, packed_dtypes: Sequence[str] = (), batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant
        self._packed = frozenset(DTYPES[name] for name in packed_dtypes)
        self._reorder = torch.ops.mkldnn._reorder_linear_weight if packed_dtypes else None
        self._product = torch.ops.mkldnn._linear_pointwise if packed_dtypes else None

    def pack_weight(
        self, parts: Mapping[str, torch.Tensor], spec: WeightSpec, dtype: str
    ) -> torch.Tensor:
        weight: torch.Tensor = super().pack_weight(parts, spec, dtype)
        return self._blocked(weight) if spec.role == "linear" else weight

    def tied_weight(self, packed: torch.Tensor, spec: WeightSpec) -> torch.Tensor:
        # An embedding is read by rows: a head tied to it needs a layout of its own.
        return self._blocked(packed)

    def _blocked(self, weight: torch.Tensor) -> torch.Tensor:
        if self._reorder is None or weight.dtype not in self._packed:
            return weight
        with torch.inference_mode():
            blocked: torch.Tensor = self._reorder(weight)
        return blocked

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        reduce: Literal["sum"] | None = None,
        lora: Any = None,
    ) -> torch.Tensor:
        if lora is not None:
            raise ValueError("the CPU's linear op has no LoRA")
        if not self._batch_invariant:
            return self._multiply(x, weight, bias)
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % TILE))
        tiles = [self._multiply(tile, weight, bias) for tile in torch.split(padded, TILE)]
        return torch.cat(tiles)[:rows] if tiles else self._multiply(x, weight, bias)

    def _multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self._product is None or not weight.is_mkldnn:
            return F.linear(x, weight, bias)
        product: torch.Tensor = self._product(x, weight, bias, "none", [], "")
        return product

    def alloc_kv(self, groups: Sequence[KVSpec], num_blocks: int, block_size: int) -> list[CpuKV]:
        by_layer: dict[int, CpuKV] = {}
        for spec in groups:
            shapes = lib.kv_shapes(
                num_blocks, spec.kv_heads, spec.head_size, spec.head_size_v, block_size
            )
            for layer in spec.layers:
                by_layer[layer] = CpuKV(*(torch.empty(s, dtype=DTYPES[spec.dtype]) for s in shapes))
        return [by_layer[layer] for layer in sorted(by_layer)]

    def write_kv(
        self, handle: CpuKV, k: torch.Tensor, v: torch.Tensor, meta: TorchInputs, group: int = 0
    ) -> CpuKV:
        steps = _steps(meta)
        key = ("write", group, k.stride(0), v.stride(0))
        step = steps.get(key)
        if step is None:
            step = steps[key] = lib.WriteStep(
                meta.slots[group],
                k_row_stride=k.stride(0),
                v_row_stride=v.stride(0),
                dtype=k.dtype,
                kv_dtype=handle.k.dtype,
                kv_heads=k.shape[1],
                head_size=k.shape[2],
                head_size_v=v.shape[2],
                block_size=handle.v.shape[2],
            )
        lib.write_kv(step, handle.k, handle.v, k, v)
        return handle

    def copy_blocks(self, handles: list[CpuKV], pairs: Sequence[tuple[int, int]]) -> list[CpuKV]:
        array = np.array(pairs, np.int64).reshape(-1, 2)
        for handle in handles:
            lib.copy_blocks(handle.k, array)
            lib.copy_blocks(handle.v, array)
        return handles

    def export_blocks(self, handles: list[CpuKV], ids: Sequence[int]) -> torch.Tensor:
        index = np.array(ids, np.int64)
        rows = []
        for handle in handles:
            for cache_ in (handle.k, handle.v):
                part = torch.empty((len(ids), *cache_.shape[1:]), dtype=cache_.dtype)
                lib.gather_blocks(part, cache_, index)
                rows.append(part.flatten(1).view(torch.uint8))
        return torch.cat(rows, dim=1)

    def import_blocks(
        self, src: torch.Tensor, handles: list[CpuKV], ids: Sequence[int]
    ) -> list[CpuKV]:
        index = np.array(ids, np.int64)
        offset = 0
        for handle in handles:
            for cache_ in (handle.k, handle.v):
                size = cache_[0].numel() * cache_.element_size()
                lib.scatter_blocks(cache_, src[:, offset : offset + size].contiguous(), index)
                offset += size
        return handles

    def paged_attention(
        self,
        q: torch.Tensor,
        handle: CpuKV,
        meta: TorchInputs,
        *,
        scale: float,
        group: int = 0,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        head_size_v = handle.v.shape[3]
        out = q.new_empty(q.shape[0], q.shape[1], head_size_v)
        steps = _steps(meta)
        key = ("attend", group, q.stride(0), q.shape[1])
        step = steps.get(key)
        if step is None:
            step = steps[key] = lib.AttentionStep(
                meta.batch.block_tables[group],
                meta.batch.query_start,
                meta.batch.context_lens,
                q_row_stride=q.stride(0),
                out_row_stride=out.stride(0),
                dtype=q.dtype,
                kv_dtype=handle.k.dtype,
                q_heads=q.shape[1],
                kv_heads=handle.k.shape[1],
                head_size=q.shape[2],
                head_size_v=head_size_v,
                block_size=handle.v.shape[2],
            )
        if sinks is None:
            layer = _layer(scale, window, softcap)
        else:
            layer = lib.AttentionLayer(scale, window=window, softcap=softcap, sinks=sinks)
        lib.paged_attention(step, layer, out, q, handle.k, handle.v)
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
    ) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        lib.rms_norm(out, x, weight, eps, offset)
        return out

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lib.add_rms_norm(x, residual, x, weight, eps, offset)
        return x, residual

    def rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        meta: TorchInputs,
        *,
        interleaved: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        style = lib.INTERLEAVED if interleaved else lib.NEOX
        lib.rotary(q, k, meta.positions, cos_sin, head_size=q.shape[-1], style=style)
        return q, k

    def act_and_mul(
        self, x: torch.Tensor, kind: Literal["silu", "gelu", "gelu_tanh"]
    ) -> torch.Tensor:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        lib.act_and_mul(out, x, kind)
        return out

    def sample(self, logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        if rows.all_greedy:
            lib.sample(out, logits, temperature=rows.temperature)
        else:
            lib.sample(
                out,
                logits,
                temperature=rows.temperature,
                top_k=rows.top_k,
                top_p=rows.top_p,
                min_p=rows.min_p,
                seed=rows.seed,
                counter=rows.counter,
            )
        return out

    def token_logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = logits.shape[0]
        logprob, norm = torch.empty(rows), torch.empty(rows)
        rank = torch.empty(rows, dtype=torch.int64)
        lib.token_logprobs(logprob, rank, norm, logits, ids)
        return logprob, rank, norm
