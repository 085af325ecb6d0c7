"""The operations: right, slow, and unforgiving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from octavo.plugins import KVSpec, Ops, PackedWeight, Transfer
from octavo_strict.cache import Handle, LateCopy, Layer, block_width
from octavo_strict.chip import (
    BLOCK,
    CHIP,
    BoundsError,
    ShapeError,
    StrictError,
    check_rows,
)
from octavo_strict.inputs import StrictInputs

NAN = float("nan")


class StrictOps(Ops):
    """Ops of the strict chip. What may work in place spoils what it was given."""

    # KV cache.

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        self._check_block_size(block_size)
        return block_width(spec) * (4 if spec.dtype == "float32" else 2)

    def alloc_kv(self, groups: Sequence[KVSpec], num_blocks: int, block_size: int) -> list[Handle]:
        self._check_block_size(block_size)
        made = {layer: Layer(spec, num_blocks) for spec in groups for layer in spec.layers}
        return [Handle(made[i]) for i in sorted(made)]

    @staticmethod
    def _check_block_size(size: int) -> None:
        if size != BLOCK:
            raise ShapeError(f"KV blocks of {size} tokens; this chip's have {BLOCK}")

    def kv_lost(self, handles: list[Handle]) -> bool:
        return any(handle.lost for handle in handles)

    def write_kv(
        self, handle: Handle, k: torch.Tensor, v: torch.Tensor, meta: StrictInputs, group: int = 0
    ) -> Handle:
        CHIP.counts["write_kv"] += 1
        layer, real = handle.take(), meta.num_tokens
        CHIP.may_fail()
        for name, new in (("k", k), ("v", v)):
            if len(new) != meta.shape[0]:
                raise ShapeError(f"{len(new)} rows of {name} for a batch of {meta.shape[0]}")
        slots = meta.slots[group][:real]
        block, offset = slots // BLOCK, slots % BLOCK
        layer.check(block, "a slot")
        if (block == 0).any():
            raise BoundsError(f"slots {slots[block == 0].tolist()} lie in the null block")
        if len(set(slots.tolist())) != real:
            raise StrictError(f"slots {slots.tolist()} are written more than once in one step")
        layer.begin(block[offset == 0], meta.step, "write_kv")
        layer.changed(block)
        spec = layer.spec
        layer.keys[block, :, : spec.head_size, offset] = k[:real].to(layer.data.dtype)
        layer.values[block, :, offset, : spec.head_size_v] = v[:real].to(layer.data.dtype)
        layer.written[block, offset] = True
        return Handle(layer)

    def copy_blocks(self, handles: list[Handle], pairs: Sequence[tuple[int, int]]) -> list[Handle]:
        CHIP.counts["copy_blocks"] += 1
        layers = [handle.take() for handle in handles]
        for layer in layers:
            layer.check(torch.tensor(pairs, dtype=torch.int64).flatten(), "copy_blocks")
            for source, target in pairs:
                if 0 in (source, target) or source == target:
                    raise BoundsError(f"copy_blocks of {source} to {target}")
                new = torch.tensor([target])
                layer.begin(new, CHIP.step + 1, "copy_blocks")
                layer.changed(new)
                layer.data[target] = layer.data[source]
                layer.written[target] = layer.written[source]
        return [Handle(layer) for layer in layers]

    def export_blocks(self, handles: list[Handle], ids: Sequence[int]) -> Transfer:
        CHIP.counts["export_blocks"] += 1
        return LateCopy([handle.look() for handle in handles], ids)

    def import_blocks(
        self, src: torch.Tensor, handles: list[Handle], ids: Sequence[int]
    ) -> list[Handle]:
        CHIP.counts["import_blocks"] += 1
        layers = [handle.take() for handle in handles]
        where, at = torch.tensor(list(ids), dtype=torch.int64), 0
        for layer in layers:
            layer.check(where, "import_blocks")
            width = layer.data[:1].view(torch.uint8).shape[1]
            layer.begin(where, CHIP.step + 1, "import_blocks")
            layer.changed(where)
            layer.data[where] = src[:, at : at + width].contiguous().view(layer.data.dtype)
            layer.written[where] = True
            at += width
        return [Handle(layer) for layer in layers]

    def drain(self) -> None:
        CHIP.counts["drain"] += 1
        CHIP.quiet = CHIP.step

    # Attention.

    def paged_attention(
        self,
        q: torch.Tensor,
        handle: Handle,
        meta: StrictInputs,
        *,
        scale: float,
        group: int = 0,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        CHIP.counts["paged_attention"] += 1
        layer, table = handle.look(), meta.block_tables[group]
        if len(q) != meta.shape[0]:
            raise ShapeError(f"{len(q)} queries for a batch of {meta.shape[0]}")
        layer.check(table, "a block table")
        out = q.new_full((len(q), q.shape[1], layer.spec.head_size_v), NAN)
        at = meta.positions[:, None]
        key_at = torch.arange(table.shape[1] * BLOCK)[None, :]
        hidden = key_at > at
        if window > 0:
            hidden |= key_at <= at - window
        # Every sequence at the size of the largest, as a program of fixed shapes computes it.
        for s in range(meta.num_seqs):
            mixed = _attend(
                q, layer, table[s], int(meta.context_lens[s]), hidden, scale, softcap, sinks
            )
            mine = (meta.sequence == s)[:, None, None]
            out = torch.where(mine, mixed.to(out.dtype), out)
            used = table[s][: -(-int(meta.context_lens[s]) // BLOCK)]
            if (used == 0).any():
                raise BoundsError(f"block table {used.tolist()} has the null block in its context")
            layer.read_at[used] = meta.step
        return out

    # The rest of the layer.

    def embedding(self, ids: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        check_rows(len(ids), "embedding")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= len(weight):
            raise BoundsError(f"tokens {ids.tolist()} of a vocabulary of {len(weight)}")
        return super().embedding(ids, weight)

    def linear(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        *,
        bias: PackedWeight | None = None,
        reduce: Literal["sum"] | None = None,
        lora: Any = None,
    ) -> torch.Tensor:
        CHIP.counts["linear"] += 1
        check_rows(len(x), "linear")
        return super().linear(x, weight, bias=bias, reduce=reduce, lora=lora)

    def rms_norm(
        self, x: torch.Tensor, weight: PackedWeight, eps: float, *, offset: float = 0.0
    ) -> torch.Tensor:
        check_rows(len(x), "rms_norm")
        return super().rms_norm(x, weight, eps, offset=offset)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: PackedWeight,
        eps: float,
        *,
        offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_rows(len(x), "add_rms_norm")
        found = super().add_rms_norm(x, residual, weight, eps, offset=offset)
        x.fill_(NAN)
        residual.fill_(NAN)
        return found

    def rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        meta: StrictInputs,
        *,
        interleaved: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_rows(len(q), "rotary")
        if int(meta.positions.max()) >= len(cos_sin) or int(meta.positions.min()) < 0:
            raise BoundsError(f"position {int(meta.positions.max())} of {len(cos_sin)}")
        found = super().rotary(q, k, cos_sin, meta, interleaved=interleaved)
        q.fill_(NAN)
        k.fill_(NAN)
        return found

    def act_and_mul(
        self, x: torch.Tensor, kind: Literal["silu", "gelu", "gelu_tanh"]
    ) -> torch.Tensor:
        check_rows(len(x), "act_and_mul")
        return super().act_and_mul(x, kind)


def _attend(
    q: torch.Tensor,
    layer: Layer,
    table: torch.Tensor,
    context: int,
    hidden: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of all q [T, Hq, D] over one sequence's blocks [W], float32 [T, Hq, Dv]. Rows of other
    sequences come out as anything. A slot of the context that nobody wrote is NaN."""
    spec, heads = layer.spec, layer.spec.kv_heads
    keys = layer.keys[table][:, :, : spec.head_size].float()  # [W, H, D, 128]
    keys = keys.permute(1, 2, 0, 3).flatten(2)  # [H, D, C]
    values = layer.values[table][..., : spec.head_size_v].float()
    values = values.transpose(0, 1).flatten(1, 2)  # [H, C, Dv]
    beyond = torch.arange(keys.shape[2]) >= context
    stale = ~layer.written[table].flatten()
    keys = keys.masked_fill(stale, NAN).masked_fill(beyond, 0.0)
    values = values.masked_fill(stale[:, None], NAN).masked_fill(beyond[:, None], 0.0)
    queries = q.float().view(len(q), heads, -1, spec.head_size).permute(1, 2, 0, 3)  # [H, G, T, D]
    scores = torch.matmul(queries, keys[:, None]) * scale  # [H, G, T, C]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(heads, -1, 1, 1).expand(-1, -1, len(q), 1)
        weights = torch.softmax(torch.cat([scores, sink], -1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    mixed = torch.matmul(weights, values[:, None])  # [H, G, T, Dv]
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)
