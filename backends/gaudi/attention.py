"""Gaudi's two attentions over the flat cache.

Decode follows the vendor's flat paged attention: queries are spread over the list of all blocks by a product
with a 0/1 matrix, each block gets a softmax of its own, and the blocks of a sequence are brought to one scale
and summed by the same matrix. Prompts run the fused attention over what they have just written, or over
gathered blocks with a mask when tokens precede them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from octavo.backends.gaudi.inputs import Decode, GaudiInputs, Prompts
from octavo.backends.gaudi.vendor import Vendor
from octavo.backends.vendor import BLOCK


@dataclass(frozen=True, slots=True)
class GaudiKV:
    """One layer's cache: k [tokens, kv_heads, d] and v [tokens, kv_heads, dv], 128 tokens to a block, with
    `inputs.RESERVED` blocks in front of the core's first."""

    k: torch.Tensor
    v: torch.Tensor
    group: int = 0  # of the batch's slots and block tables

    @property
    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as [blocks, 128, kv_heads, d]."""
        k, v = (x.view(-1, BLOCK, *x.shape[1:]) for x in (self.k, self.v))
        return k, v


@dataclass(frozen=True, slots=True)
class Scoring:
    """What is done to scores."""

    scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap > 0 else scores


def hidden(dtype: torch.dtype) -> float:
    """Stands for minus infinity: a block whose every key is masked then has a softmax, of weight zero."""
    return torch.finfo(dtype).min


# ---------------------------------------------------------------------------------------- decode


def decode_attention(
    q: torch.Tensor, cache: GaudiKV, part: Decode, meta: GaudiInputs, how: Scoring, lib: Vendor
) -> torch.Tensor:
    """q [B, Hq, D] -> [B, Hq, Dv]."""
    kv_heads, dv = cache.v.shape[1:]
    mapping = _mapping(part, meta, q.dtype)  # [N, B]
    bias = _bias(part, meta, how.window)  # [N, 1, 1, 1, 128]
    spread = (mapping @ (q * how.scale).flatten(1)).view(len(mapping), kv_heads, -1, 1, q.shape[2])
    keys, values = (
        blocks.index_select(0, part.blocks).to(q.dtype).transpose(1, 2).unsqueeze(2)
        for blocks in cache.blocks
    )  # [N, kv_heads, 1, 128, d]
    scores = how.capped((spread @ keys.transpose(-1, -2)).float())
    live = (part.groups >= 0).view(-1, 1, 1, 1, 1)
    if how.sinks is None and lib.gaudi3:
        weights, top, sums = torch.ops.hpu.block_softmax(scores, bias, part.groups)
        mixed = weights.to(q.dtype) @ values
        shape = [*mixed.shape[:3], 1, 1]
        rescale = torch.ops.hpu.block_softmax_adjustment(top, sums, part.groups, part.size, shape)
    else:
        scores = scores + bias
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top).exp()
        sums = weights.sum(-1, keepdim=True)
        mixed = weights.to(q.dtype) @ values
        rescale = _adjustment(top, sums, part, how.sinks)
    # What padding blocks bring is undefined, and the product below would carry it into every row.
    rescale = torch.where(live, rescale, torch.zeros_like(rescale))
    mixed = mixed * rescale.to(q.dtype)
    summed: torch.Tensor = mapping.t() @ mixed.flatten(1)
    return summed.view(part.size, -1, dv)


def _mapping(part: Decode, meta: GaudiInputs, dtype: torch.dtype) -> torch.Tensor:
    """[N, B]: 1 where a block belongs to a sequence."""
    key = (id(part), "mapping", dtype)
    if key not in meta.made:
        columns = torch.arange(part.size, device=part.groups.device)
        meta.made[key] = (part.groups.unsqueeze(1) == columns).to(dtype)
    made: torch.Tensor = meta.made[key]
    return made


def _bias(part: Decode, meta: GaudiInputs, window: int) -> torch.Tensor:
    """[N, 1, 1, 1, 128] float32: what is added to the scores of keys a query does not see."""
    key = (id(part), "bias", window)
    if key not in meta.made:
        at = part.starts.unsqueeze(1) + torch.arange(BLOCK, device=part.starts.device)
        query = part.queries.unsqueeze(1)
        masked = at > query
        if window > 0:
            masked = masked | (at <= query - window)
        bias = torch.zeros(masked.shape, device=masked.device).masked_fill(
            masked, hidden(torch.float32)
        )
        meta.made[key] = bias.view(-1, 1, 1, 1, BLOCK)
    made: torch.Tensor = meta.made[key]
    return made


def _adjustment(
    top: torch.Tensor, sums: torch.Tensor, part: Decode, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The block softmax adjustment in plain operations: for chips without it, and for sinks."""
    owner = torch.where(part.groups >= 0, part.groups, torch.full_like(part.groups, part.size))
    room = (part.size + 1, *top.shape[1:])
    most = torch.full(room, hidden(top.dtype), dtype=top.dtype, device=top.device)
    most = most.index_reduce(0, owner, top, "amax")
    sink = None
    if sinks is not None:
        sink = sinks.to(top.dtype).view(1, *top.shape[1:])
        most = torch.maximum(most, sink)
    scale = (top - most.index_select(0, owner)).exp()
    total = torch.zeros(room, dtype=top.dtype, device=top.device).index_add(0, owner, scale * sums)
    if sink is not None:
        total = total + (sink - most).exp()
    return scale / total.index_select(0, owner)


# --------------------------------------------------------------------------------------- prompts


def prompt_attention(
    q: torch.Tensor,
    cache: GaudiKV,
    part: Prompts,
    meta: GaudiInputs,
    how: Scoring,
    lib: Vendor,
    fresh: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """q [T, Hq, D] -> [P · Q, Hq, Dv]. fresh: keys and values [T, kv_heads, d] of this step, if at hand."""
    count, width = part.positions.shape

    def rectangle(x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, part.rows).view(count, width, *x.shape[1:]).transpose(1, 2)

    queries = rectangle(q)  # [P, Hq, Q, D]
    fused = how.softcap == 0 and how.sinks is None
    if fused and part.whole and fresh is not None and how.window == 0:
        keys, values = (rectangle(x).to(q.dtype) for x in fresh)
        out = lib.fused_sdpa(
            *(queries, keys, values, None, 0.0, True, how.scale, "None", True),
            *(part.lengths, "right"),
        )
    else:
        assert part.table is not None
        keys, values = (
            blocks.index_select(0, part.table.flatten())
            .to(q.dtype)
            .view(count, -1, *blocks.shape[2:])
            .transpose(1, 2)
            for blocks in cache.blocks
        )  # [P, kv_heads, W · 128, d]
        bias = _prompt_bias(part, meta, how.window, q.dtype)
        if fused:
            out = lib.fused_sdpa(
                *(queries, keys, values, bias, 0.0, False, how.scale, "None", True, None, "right")
            )
        else:
            out = _plain_attention(queries, keys, values, bias, how)
    mixed: torch.Tensor = out.transpose(1, 2).flatten(0, 1)
    return mixed


def _prompt_bias(part: Prompts, meta: GaudiInputs, window: int, dtype: torch.dtype) -> torch.Tensor:
    """[P, 1, Q, W · 128]: what is added to the scores of keys a row does not see. Every row sees one."""
    key = (id(part), "bias", window, dtype)
    if key not in meta.made:
        assert part.table is not None
        at = torch.arange(part.table.shape[1] * BLOCK, device=part.positions.device)
        row = part.positions.unsqueeze(-1)
        masked = at > row
        if window > 0:
            masked = masked | (at <= row - window)
        bias = torch.zeros(masked.shape, dtype=dtype, device=masked.device)
        meta.made[key] = bias.masked_fill(masked, hidden(dtype)).unsqueeze(1)
    made: torch.Tensor = meta.made[key]
    return made


def _plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, how: Scoring
) -> torch.Tensor:
    """For soft caps and sinks, which the fused attention has not. q [P, Hq, Q, D] -> [P, Hq, Q, Dv]."""
    grouped = q.view(len(q), k.shape[1], -1, *q.shape[2:])  # [P, kv_heads, group, Q, D]
    scores = how.capped((grouped @ k.unsqueeze(2).transpose(-1, -2)).float() * how.scale)
    scores = scores + bias.unsqueeze(1).float()
    most = scores.amax(-1, keepdim=True)
    sink = torch.full_like(most, -math.inf)
    if how.sinks is not None:
        sink = how.sinks.float().view(1, k.shape[1], -1, 1, 1).expand_as(most)
        most = torch.maximum(most, sink)
    weights = (scores - most).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + (sink - most).exp())
    return (weights.to(q.dtype) @ v.unsqueeze(2)).flatten(1, 2)
