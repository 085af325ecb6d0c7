"""The ops that the C++ kernels run. A layer's KV handle is a `CpuKV`; what a kernel needs of a step is
described once, at the first layer, and kept in the step's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from octavo.backends.cpu import kv
from octavo.backends.cpu.kv import CpuKV
from octavo.core import huge_pages
from octavo.core.ops import DTYPES, TorchInputs, concatenated
from octavo.core.quantization.base import QuantizedTensor
from octavo.kernels import cpu as lib
from octavo.plugins import Ctx, DecoderSpec, KVSpec, LayerSpec, Ops, SampleInputs, WeightSpec

if TYPE_CHECKING:
    from octavo.backends.cpu.providers import Provider
    from octavo.core.instruments import Product


@dataclass(frozen=True, slots=True)
class ProvidedWeight:
    """A linear weight in the hands of another library."""

    product: Product


@cache
def _layer(scale: float, window: int, softcap: float) -> Any:
    return lib.AttentionLayer(scale, window=window, softcap=softcap)


def _layer_step(spec: LayerSpec, handle: CpuKV, meta: TorchInputs) -> lib.LayerStep:
    """What the fused layer needs of a step: q, k and v are columns of one float32 buffer."""
    columns = (spec.q_heads + 2 * spec.kv_heads) * spec.head_size
    shape: dict[str, Any] = {
        "dtype": torch.float32,
        "kv_dtype": handle.k.dtype,
        "kv_heads": spec.kv_heads,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size,
        "block_size": handle.block_size,
        "block_strides": handle.block_strides,
    }
    tables, starts, contexts, slots, positions = _arrays(meta, spec.group)
    attention = lib.AttentionStep(
        tables,
        starts,
        contexts,
        q_row_stride=columns,
        out_row_stride=spec.q_heads * spec.head_size,
        q_heads=spec.q_heads,
        **shape,
    )
    write = lib.WriteStep(slots, k_row_stride=columns, v_row_stride=columns, **shape)
    return lib.LayerStep(attention, write, positions)


def _arrays(meta: TorchInputs, group: int) -> tuple[Any, Any, Any, Any, Any]:
    """What a layer of the group needs of a step, as `LayerStep.fill` takes it."""
    batch = meta.batch
    tables = batch.block_tables[group]
    return tables, batch.query_start, batch.context_lens, batch.slots[group], batch.positions


def _tails(meta: TorchInputs) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """How many last rows of each sequence hold all its rows whose logits are wanted; None where that is all."""
    if meta.logits_rows is None:
        return None
    batch = meta.batch
    starts, rows = batch.query_start, batch.logits_rows
    tails = np.zeros(len(starts) - 1, np.int32)
    owner = np.searchsorted(starts, rows, side="right") - 1
    np.maximum.at(tails, owner, starts[owner + 1] - rows)
    return tails


def _announce(region: kv.Region, slots: Any, block_size: int) -> None:
    """A step is about to write to these slots."""
    if len(slots):
        region.use(int(slots.max()) // block_size)


def _steps(meta: TorchInputs) -> dict[Any, Any]:
    if meta.extra is None:
        meta.extra = {}
    steps: dict[Any, Any] = meta.extra
    return steps


def _unpacked(spec: WeightSpec, dtype: str) -> lib.PackedWeight:
    n, k = spec.shape
    return lib.PackedWeight(n, k, spec.scheme or dtype, group=spec.group or k, gated=spec.gated)


COVERED = (
    "linear",
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "write_kv",
    "paged_attention",
    "act_and_mul",
)
"""The ops whose work `decoder_layer` does."""


@dataclass(slots=True)
class BoundStack:
    """Layers bound to weights and caches for the kernel, what they were bound by, and the steps they
    share: by KV group and shape, as filled for the inputs `meta`. last: the last layer's step. ends: what stands
    around all layers of a model, once it was asked for."""

    specs: LayerSpec | Sequence[LayerSpec]
    weights: Mapping[str, Any]
    stack: lib.LayerStack
    steps: list[tuple[int, lib.LayerStep, CpuKV]]
    last: lib.LayerStep
    meta: TorchInputs
    ends: lib.DecoderEnds | None = None


class CpuOps(Ops):
    """The C++ kernels. Weights are stored in the dtype or scheme asked for; activations are float32.

    A row's bits depend neither on the batch nor on chunking: no kernel sums in an order that does.
    """

    device = "cpu"
    # A file's pages are small ones.
    keeps_packed: ClassVar = not huge_pages.available()
    draws_finite: ClassVar = True
    fusions: ClassVar = {
        "decoder_layer": COVERED,
        "decoder_layers": ("decoder_layer", *COVERED),
        "decoder_logits": ("decoder_layer", "decoder_layers", "embedding", *COVERED),
    }

    def __init__(self, provider: Provider | None = None) -> None:
        """provider: a library whose products stand in for the kernels' where weights have its format."""
        self._provider = provider
        self._results = huge_pages.Recycled()

    def supports(self, name: str, spec: LayerSpec) -> bool:
        return name in self.fusions and self._provider is None

    def decoder_layer(self, x: torch.Tensor, spec: LayerSpec, ctx: Ctx) -> torch.Tensor:
        lib.decoder_layers(self._bound((spec,), spec, ctx, None).stack, x)
        return x

    def decoder_layers(self, x: torch.Tensor, specs: Sequence[LayerSpec], ctx: Ctx) -> torch.Tensor:
        tails = _tails(ctx.meta) if ctx.logits_only else None
        lib.decoder_layers(self._bound(specs, specs, ctx, tails).stack, x)
        return x

    def decoder_logits(self, spec: DecoderSpec, ctx: Ctx) -> torch.Tensor:
        weights, meta = ctx.weights, ctx.meta
        found = self._bound(spec.layers, spec.layers, ctx, _tails(meta))
        if found.ends is None:
            embedding, head, norm = (weights[n] for n in (spec.embedding, spec.head, spec.norm))
            found.ends = lib.DecoderEnds(embedding, head, norm, spec.eps, spec.norm_offset)
        rows = meta.logits_rows
        count = (meta.token_ids if rows is None else rows).shape[0]
        out = self._results.empty(count, weights[spec.head].n)  # a step's logits are large
        lib.decoder_logits(out, found.stack, found.ends, meta.token_ids, rows)
        return out

    def _bound(
        self,
        specs: Sequence[LayerSpec],
        by: LayerSpec | Sequence[LayerSpec],
        ctx: Ctx,
        tails: np.ndarray[Any, np.dtype[np.int32]] | None,
    ) -> BoundStack:
        """The layers, with this step's arrays. `by` is what they are found again by, `tails` which rows are
        wanted after the last."""
        meta: TorchInputs = ctx.meta
        bound = ctx.kv[specs[0].layer].bound
        found: BoundStack | None = bound.get(id(by))
        if found is None or found.weights is not ctx.weights:
            found = bound[id(by)] = self._bind_all(specs, by, ctx)
        elif found.meta is not meta:
            for group, step, handle in found.steps:
                arrays = _arrays(meta, group)
                step.fill(*arrays)
                _announce(handle.region, arrays[3], handle.block_size)
            found.meta = meta
        found.last.keep_tails(tails)
        return found

    def _bind_all(
        self, specs: Sequence[LayerSpec], by: LayerSpec | Sequence[LayerSpec], ctx: Ctx
    ) -> BoundStack:
        steps: dict[tuple[int, ...], tuple[lib.LayerStep, CpuKV]] = {}
        mine = []
        for spec in specs:
            key = (spec.group, spec.q_heads, spec.kv_heads, spec.head_size)
            if key not in steps:
                handle = ctx.kv[spec.layer]
                _announce(handle.region, _arrays(ctx.meta, spec.group)[3], handle.block_size)
                steps[key] = _layer_step(spec, handle, ctx.meta), handle
            mine.append(steps[key][0])
        layers = [self._bind(spec, ctx.kv[spec.layer], ctx.weights) for spec in specs]
        filled = [(key[0], step, handle) for key, (step, handle) in steps.items()]
        return BoundStack(by, ctx.weights, lib.LayerStack(layers, mine), filled, mine[-1], ctx.meta)

    def _bind(self, spec: LayerSpec, handle: CpuKV, weights: Mapping[str, Any]) -> lib.DecoderLayer:
        return lib.DecoderLayer(
            norms=(weights[spec.norm_1], weights[spec.norm_2]),
            weights=tuple(weights[n] for n in (spec.qkv, spec.out, spec.gate_up, spec.down)),
            biases=tuple(  # type: ignore[arg-type]
                weights[name] if name is not None else None
                for name in (spec.qkv_bias, spec.out_bias, spec.gate_up_bias, spec.down_bias)
            ),
            cos_sin=weights[spec.rotary],
            attention=lib.AttentionLayer(spec.scale, window=spec.window, softcap=spec.softcap),
            caches=(handle.k, handle.v),
            eps=spec.eps,
            norm_offset=spec.norm_offset,
            rotary_style=lib.INTERLEAVED if spec.interleaved else lib.NEOX,
            act=lib.ACTIVATIONS[spec.act],
        )

    def pack_weight(
        self, parts: Mapping[str, torch.Tensor | QuantizedTensor], spec: WeightSpec, dtype: str
    ) -> torch.Tensor | lib.PackedWeight | ProvidedWeight:
        if spec.role in ("norm", "bias"):
            small: torch.Tensor = super().pack_weight(parts, spec, "float32")
            return small
        stacked = [parts[name] for name, _ in spec.parts]
        codes = [part for part in stacked if isinstance(part, QuantizedTensor)]
        floats = [part for part in stacked if isinstance(part, torch.Tensor)]
        provider = self._provider
        if provider and spec.role == "linear" and (spec.scheme or dtype) == provider.path.format:
            return ProvidedWeight(provider.path.pack(torch.cat([part.float() for part in floats])))
        if not codes:
            return _unpacked(spec, dtype).pack(floats)
        whole = codes[0] if len(codes) == 1 else concatenated(codes)
        return _unpacked(spec, dtype).pack_codes(whole.codes, whole.scales, whole.minima)

    def weight_bytes(self, spec: WeightSpec, dtype: str) -> int:
        if spec.role in ("norm", "bias"):
            return super().weight_bytes(spec, "float32")
        return _unpacked(spec, dtype).nbytes

    def packed_key(self) -> str | None:
        # What another library has made of a weight is not ours to keep.
        return None if self._provider else f"cpu/{lib.PACKING}/{lib.isa()}"

    def store_packed(
        self, packed: torch.Tensor | lib.PackedWeight, spec: WeightSpec
    ) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed.view(torch.uint8).flatten()
        assert packed.buffer is not None
        return packed.buffer

    def load_packed(
        self, data: torch.Tensor, spec: WeightSpec, dtype: str
    ) -> torch.Tensor | lib.PackedWeight:
        if spec.role in ("norm", "bias"):
            small = data.view(torch.float32).view(spec.shape)
            return small if self.keeps_packed else small.clone()
        weight = _unpacked(spec, dtype)
        if self.keeps_packed:
            weight.place(data)
        else:
            weight.copy(data)
        return weight

    def embedding(self, ids: torch.Tensor, weight: lib.PackedWeight) -> torch.Tensor:
        out = torch.empty(ids.shape[0], weight.k)
        lib.unpack_rows(out, weight, ids)
        return out

    def linear(
        self,
        x: torch.Tensor,
        weight: lib.PackedWeight | ProvidedWeight,
        *,
        bias: torch.Tensor | None = None,
        reduce: Literal["sum"] | None = None,
        lora: Any = None,
    ) -> torch.Tensor:
        if lora is not None:
            raise ValueError("the CPU's linear op has no LoRA")
        if isinstance(weight, ProvidedWeight):
            result = weight.product(x)
            return result if bias is None else result.add_(bias)
        out = self._results.empty(x.shape[0], weight.n)  # a step's logits are large
        lib.linear(out, x, weight, bias)
        return out

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        if spec.dtype != "int8":
            return super().kv_block_bytes(spec, block_size)
        return block_size * spec.kv_heads * (spec.head_size + spec.head_size_v + 8)

    def alloc_kv(self, groups: Sequence[KVSpec], num_blocks: int, block_size: int) -> list[CpuKV]:
        by_layer: dict[int, CpuKV] = {}
        for spec in groups:
            dtype = torch.int8 if spec.dtype == "int8" else DTYPES[spec.dtype]
            shapes = lib.kv_shapes(
                num_blocks,
                spec.kv_heads,
                spec.head_size,
                spec.head_size_v,
                block_size,
                scales=dtype == torch.int8,
            )
            by_layer |= kv.allocate(spec.layers, shapes, dtype, block_size, spec.head_size_v)
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
                block_size=handle.block_size,
                block_strides=handle.block_strides,
            )
            _announce(handle.region, meta.batch.slots[group], handle.block_size)
        lib.write_kv(step, handle.k, handle.v, k, v)
        return handle

    def copy_blocks(self, handles: list[CpuKV], pairs: Sequence[tuple[int, int]]) -> list[CpuKV]:
        array = np.array(pairs, np.int64).reshape(-1, 2)
        for piece in kv.pieces(handles):
            lib.copy_blocks(piece, array)
        return handles

    def export_blocks(self, handles: list[CpuKV], ids: Sequence[int]) -> torch.Tensor:
        index = np.array(ids, np.int64)
        parts = []
        for piece in kv.pieces(handles):
            part = torch.empty((len(ids), piece.shape[1]), dtype=torch.uint8)
            lib.gather_blocks(part, piece, index)
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        # numpy copies: torch would wake threads of its own
        return torch.from_numpy(np.concatenate([part.numpy() for part in parts], axis=1))

    def import_blocks(
        self, src: torch.Tensor, handles: list[CpuKV], ids: Sequence[int]
    ) -> list[CpuKV]:
        index = np.array(ids, np.int64)
        rows, offset = src.numpy(), 0
        for piece in kv.pieces(handles):
            part = np.ascontiguousarray(rows[:, offset : offset + piece.shape[1]])
            lib.scatter_blocks(piece, torch.from_numpy(part), index)
            offset += piece.shape[1]
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
        head_size_v = handle.head_size_v
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
                block_size=handle.block_size,
                block_strides=handle.block_strides,
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
        out = torch.empty(x.shape, dtype=x.dtype)
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

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        lib.mask_logits(logits, rows, words)

    def best_allowed(
        self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty(rows.shape[0], dtype=torch.int64)
        lib.best_allowed(out, logits, rows, words)
        return out

    def token_logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = logits.shape[0]
        logprob, norm = torch.empty(rows), torch.empty(rows)
        rank = torch.empty(rows, dtype=torch.int64)
        lib.token_logprobs(logprob, rank, norm, logits, ids)
        return logprob, rank, norm
