"""`FusedSDPA` and rotary positions."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch


class RotaryPosEmbeddingMode(Enum):
    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(p: torch.Tensor, *args: Any) -> torch.Tensor:
    """cos, sin, position_ids, offset and mode follow `p`; float32 when any of the three tensors is."""
    cos, sin, position_ids, offset, mode = args
    if torch.float32 in (p.dtype, cos.dtype, sin.dtype):
        p, cos, sin = p.float(), cos.float(), sin.float()
    return torch.ops.hpu.rotary_pos_embedding(p, sin, cos, position_ids, offset, mode.value)


class FusedSDPA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Any = None,
        seq_padding_type: str = "left",
    ) -> Any:
        if is_causal and attn_mask is not None:
            raise RuntimeError("FusedSDPA takes a mask or is_causal, not both")
        if valid_seq_len is not None and not (is_causal and recompute_mode):
            raise RuntimeError("valid_seq_len needs is_causal and recompute_mode")
        if softmax_mode not in ("None", "fast", "fp32") or seq_padding_type not in (
            "left",
            "right",
        ):
            raise RuntimeError(f"no such mode: {softmax_mode}, {seq_padding_type}")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return torch.ops.hpu.sdpa_recomp_fwd(
            *(q, k, v, attn_mask, dropout_p, scale, is_causal, False, softmax_mode),
            *(valid_seq_len, seq_padding_type),
        )[0]
