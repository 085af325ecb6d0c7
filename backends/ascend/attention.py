"""Attention over Ascend's paged cache by the vendor's two operations.

A step of one row per sequence runs `_npu_paged_attention`. Any other, and one with a window or sinks, runs
`npu_fused_infer_attention_score` on rows packed as TND, with cumulative query lengths, a length of keys for
each sequence and the compressed 2048 x 2048 mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from octavo.backends.ascend.inputs import Step
from octavo.backends.vendor import BLOCK

MASK_SIZE = 2048

CAUSAL, BAND = 3, 4
"""Values of `sparse_mode`: rows see all keys up to their own, counted from a sequence's end; a band of them."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of one call."""

    q: int
    kv: int
    scale: float


def compressed_mask(device: str) -> torch.Tensor:
    """[2048, 2048] bool, true above the diagonal: what is hidden. The operation repeats it along the keys."""
    ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device)
    return torch.triu(ones, diagonal=1)


def paged(
    npu: Any,
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    step: Step,
    heads: Heads,
) -> torch.Tensor:
    """q [S, Hq, D], one row per sequence -> [S, Hq, Dv]."""
    out = torch.empty(len(q), heads.q, cache[1].shape[3], dtype=q.dtype, device=q.device)
    npu._npu_paged_attention(
        query=q,
        key_cache=cache[0],
        value_cache=cache[1],
        num_kv_heads=heads.kv,
        num_heads=heads.q,
        scale_value=heads.scale,
        block_table=table,
        context_lens=step.host_lengths,
        out=out,
    )
    return out


def fused(
    npu: Any,
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    step: Step,
    heads: Heads,
    mask: torch.Tensor,
    window: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [T, Hq, D] of packed sequences -> [T, Hq, Dv].

    The operation ignores windows where every sequence has one row. Such a step repeats each row, so that a
    sequence has two, aligned to its end, and takes the second.
    """
    ends = step.query_ends
    twice = step.decode and window > 0
    if twice:
        q = q.unsqueeze(1).expand(-1, 2, -1, -1).flatten(0, 1)
        ends = [2 * end for end in ends]
    keys, values = (x.view(len(x), BLOCK, -1) for x in cache)
    sparse: dict[str, Any] = {"sparse_mode": CAUSAL}
    if window > 0:  # the row itself and so many before it
        sparse = {"sparse_mode": BAND, "pre_tokens": window - 1, "next_tokens": 0}
    common: dict[str, Any] = {
        "atten_mask": mask,
        "block_table": table,
        "input_layout": "TND",
        "block_size": BLOCK,
        "num_key_value_heads": heads.kv,
        **sparse,
    }
    if sinks is None:
        out = npu.npu_fused_infer_attention_score(
            *(q.contiguous(), keys, values),
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=step.kv_lengths,
            num_heads=heads.q,
            scale=heads.scale,
            **common,
        )[0]
    else:
        out = npu.npu_fused_infer_attention_score_v2(
            *(q.contiguous(), keys, values),
            actual_seq_qlen=ends,
            actual_seq_kvlen=step.kv_lengths,
            num_query_heads=heads.q,
            softmax_scale=heads.scale,
            learnable_sink=sinks.to(q.dtype),
            **common,
        )[0]
    found: torch.Tensor = out
    return found.view(-1, 2, *found.shape[1:]).select(1, 1) if twice else found
