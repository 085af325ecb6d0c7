"""`torch.ops.hpu`: the vendor's schemas with CPU bodies.

Where the vendor leaves numbers undefined they are NaN here: whoever reads them is found out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from habana_frameworks.torch.standin import calls, device

_library = torch.library.Library("hpu", "DEF")


def _move(tree: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, move, tree)


def operation(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a CPU body for a schema, on the hpu device."""
    name = schema.partition("(")[0]

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            host = device().as_host
            out = body(*_move(args, host), **_move(kwargs, host))
            return _move(out, lambda t: device().as_device(t.contiguous()))

        _library.define(schema)
        _library.impl(name, run, "HPU")
        return body

    return register


@operation(
    "block_softmax(Tensor attn, Tensor block_bias, Tensor block_groups) -> (Tensor, Tensor, Tensor)"
)
def block_softmax(attn: Any, block_bias: Any, block_groups: Any) -> Any:
    """attn [blocks, kv_heads, group, tokens, block] -> exponentials; maxima and sums [blocks, padded]."""
    if attn.dim() != 5:
        raise RuntimeError(f"block_softmax takes 5 dimensions, got {attn.dim()}")
    scores = attn + block_bias
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    live = (block_groups != -1).view(-1, 1, 1, 1, 1)
    sums = torch.where(live, weights.sum(-1, keepdim=True), math.nan)
    top = torch.where(live, top, math.nan)
    flat = attn[0, :, :, :, 0].numel()
    multiple = 64 if attn.dtype == torch.float32 else 128
    room = -(-flat // multiple) * multiple

    def padded(x: torch.Tensor) -> torch.Tensor:
        out = x.new_full((len(x), room), math.nan)
        out[:, :flat] = x.flatten(1)
        return out

    return torch.where(live, weights, 0.0).to(attn.dtype), padded(top), padded(sums)


@operation(
    "block_softmax_adjustment(Tensor block_maxes, Tensor block_sums, Tensor block_groups, "
    "int batch_size, int[]? out_shape=None) -> Tensor"
)
def block_softmax_adjustment(
    block_maxes: Any,
    block_sums: Any,
    block_groups: Any,
    batch_size: int,
    out_shape: list[int] | None = None,
) -> Any:
    """What each block's weights are to be multiplied by, so that a sequence's blocks are one softmax."""
    if out_shape is None:
        raise RuntimeError("If no out_shape provided, block_maxes tensor must be 5-dimensional")
    flat = math.prod(out_shape[1:])
    top, sums = block_maxes[:, :flat].float(), block_sums[:, :flat].float()
    out = torch.full_like(top, math.nan)
    for g in range(batch_size):
        mine = block_groups == g
        if mine.any():
            scale = (top[mine] - top[mine].amax(0)).exp()
            out[mine] = scale / (scale * sums[mine]).sum(0)
    return out.view(out_shape).to(block_maxes.dtype)


@operation(
    "rotary_pos_embedding(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, "
    "int mode) -> Tensor"
)
def rotary_pos_embedding(
    p: Any, sin: Any, cos: Any, position_ids: Any, offset: int, mode: int
) -> Any:
    if position_ids is not None or offset:
        raise RuntimeError("the stand-in takes cosines and sines of the rows' own positions")
    if cos.shape[-1] != p.shape[-1]:
        raise RuntimeError(f"cos has {cos.shape[-1]} columns and input {p.shape[-1]}")
    if mode == 0:  # blockwise
        a, b = p.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
    else:  # pairwise
        turned = torch.stack((-p[..., 1::2], p[..., 0::2]), -1).flatten(-2)
    return p * cos + turned * sin


@operation("rms_norm(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)")
def rms_norm(data_in: Any, gamma: Any, epsilon: float) -> Any:
    if data_in.dtype != gamma.dtype or data_in.dim() < 3:
        raise RuntimeError("rms_norm takes one dtype and three dimensions")
    wide = data_in.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * inverse).to(data_in.dtype) * gamma, inverse


@operation(
    "sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, float dropout_p, float scale, "
    "bool is_causal, bool requires_backward, str softmax_mode, Tensor? valid_seq_len, "
    "str seq_padding_type) -> (Tensor, Tensor, Tensor, Tensor)"
)
def sdpa_recomp_fwd(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    dropout_p: float,
    scale: float,
    is_causal: bool,
    requires_backward: bool,
    softmax_mode: str,
    valid_seq_len: Any,
    seq_padding_type: str,
) -> Any:
    """q [batch, heads, rows, d], k and v [batch, kv_heads, keys, d]. Rows past a sequence's length are NaN."""
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, 1)
    values = v.float().repeat_interleave(group, 1)
    scores = q.float() @ keys.transpose(-1, -2) * scale
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    if attn_mask is not None:
        scores = scores + attn_mask.float()
    if is_causal:
        scores = scores.masked_fill(columns > rows, -math.inf)
    past = None
    if valid_seq_len is not None:
        lengths = valid_seq_len.view(-1, 1, 1, 1)
        scores = scores.masked_fill(columns >= lengths, -math.inf)
        past = rows >= lengths
    out = (scores.softmax(-1) @ values).to(q.dtype)
    if past is not None:
        out = out.masked_fill(past, math.nan)
    nothing = q.new_zeros(0)
    return out, nothing, nothing, nothing


@operation(
    "cast_to_fp8_v2(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, "
    "bool is_amax=False, ScalarType? dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)"
)
def cast_to_fp8_v2(
    x: Any,
    scale: Any = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: Any = None,
    scale_shape: Any = None,
) -> Any:
    kind = dtype or torch.float8_e5m2
    wide = x.float() if scale is None else x.float() * scale.float()
    most = torch.finfo(kind).max
    return wide.clamp(-most, most).to(kind), x.float().abs().amax().view(1)


@operation(
    "fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, "
    "Tensor? A_scale_inv=None, Tensor? B_scale_inv=None, Tensor? bias=None, bool accumulate=False, "
    "int[]? B_scale_shape=None) -> Tensor"
)
def fp8_gemm_v2(
    a: Any,
    trans_a: bool,
    b: Any,
    trans_b: bool,
    d: Any,
    out_dtype: Any,
    a_scale_inv: Any = None,
    b_scale_inv: Any = None,
    bias: Any = None,
    accumulate: bool = False,
    b_scale_shape: Any = None,
) -> Any:
    left, right = a.float(), b.float()
    out = (left.T if trans_a else left) @ (right.T if trans_b else right)
    for scale in (a_scale_inv, b_scale_inv):
        out = out if scale is None else out * scale.float()
    return (out if bias is None else out + bias.float()).to(out_dtype)
