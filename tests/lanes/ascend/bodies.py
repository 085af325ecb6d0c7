"""CPU bodies behind torch-npu's own operations: its schemas, numbers computed on the host, calls counted.

Where the vendor leaves numbers undefined they are NaN here: whoever reads them is found out.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

calls: Counter[str] = Counter()
"""How often each operation ran its body."""

_libraries = {name: torch.library.Library(name, "IMPL") for name in ("npu", "atb")}


def body(name: str) -> Any:
    """Makes a function the CPU kernel of the operation `namespace::name`."""
    namespace, _, short = name.partition("::")

    def register(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[short] += 1
            return function(*args, **kwargs)

        _libraries[namespace].impl(short, run, "CPU")
        return function

    return register


def check(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(text)


@body("atb::_npu_reshape_and_cache")
def reshape_and_cache(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    check(slots.dtype == torch.int32, "slot_indices are int32")
    check(key.is_contiguous() and value.is_contiguous(), "key and value are contiguous")
    check(key.dtype == key_cache.dtype and value.dtype == value_cache.dtype, "one dtype")
    check(bool((slots >= 0).all()), "a slot is outside the cache")
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[slots.long()] = new


def attend(
    q: Any, keys: Any, values: Any, scale: float, window: int, sinks: Any, causal: bool
) -> Any:
    """One sequence: q [n, Hq, D] are the last rows of keys [m, Hkv, D]. Rows that see nothing are NaN."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    at = torch.arange(len(keys) - len(q), len(keys))[:, None]
    key_at = torch.arange(len(keys))[None]
    if causal:
        scores = scores.masked_fill(key_at > at, -math.inf)
    if window:
        scores = scores.masked_fill(key_at <= at - window, -math.inf)
    if sinks is not None:
        extra = sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)
        weights = torch.cat((scores, extra), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


@body("atb::_npu_paged_attention")
def paged_attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Any,
    context_lens: Any,
    out: Any,
    *,
    workspace: Any = None,
) -> None:
    check(block_table.dtype == context_lens.dtype == torch.int32, "table and lengths are int32")
    check(query.dtype == key_cache.dtype, "query and cache have one dtype")
    check(len(query) == len(block_table) == len(context_lens), "a row, a table, a length each")
    check(query.shape[1] == num_heads and key_cache.shape[2] == num_kv_heads, "numbers of heads")
    for s, length in enumerate(context_lens.tolist()):
        blocks = block_table[s].long()
        keys, values = (c[blocks].flatten(0, 1)[:length] for c in (key_cache, value_cache))
        out[s] = attend(query[s : s + 1], keys, values, scale_value, 0, None, True)[0]


def fused(
    query: Any,
    key: Any,
    value: Any,
    *,
    ends: Any,
    lengths: Any,
    table: Any,
    mask: Any,
    q_heads: int,
    kv_heads: int,
    scale: float,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    block_size: int,
    sinks: Any = None,
) -> Any:
    check(input_layout == "TND" and block_size == 128, "TND over blocks of 128")
    check(query.is_contiguous() and key.is_contiguous(), "tensors are contiguous")
    check(key.shape == (len(key), 128, key.shape[2]), "the cache is [blocks, 128, heads x size]")
    check(ends[-1] == len(query), "cumulative lengths end at the last row")
    check(len(ends) == len(lengths) == len(table), "an end, a length and a table each")
    check(mask.shape == (2048, 2048) and mask.dtype == torch.bool, "the compressed mask")
    check(table.dtype == torch.int32, "the table is int32")
    check(query.dtype == key.dtype, "query and cache have one dtype")
    counts = [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    check(min(counts) > 0, "no empty sequence")
    window = 0
    if (
        sparse_mode == 4 and max(counts) > 1
    ):  # of single rows the operation sees neither mode nor band
        check(next_tokens == 0, "a band that ends at the row")
        window = pre_tokens + 1
    out, begin = torch.empty_like(query), 0
    for s, end in enumerate(ends):
        blocks = table[s].long()
        keys, values = (
            c[blocks].reshape(-1, kv_heads, c.shape[2] // kv_heads)[: lengths[s]]
            for c in (key, value)
        )
        out[begin:end] = attend(query[begin:end], keys, values, scale, window, sinks, True)
        begin = end
    check(query.shape[1] == q_heads, "numbers of heads")
    return out, query.new_zeros(1, dtype=torch.float32)


@body("npu::npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: Any,
    key: Any,
    value: Any,
    *,
    actual_seq_lengths: Any = None,
    actual_seq_lengths_kv: Any = None,
    atten_mask: Any = None,
    block_table: Any = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    **rest: Any,
) -> Any:
    check(set(rest) <= {"workspace"}, f"what is not used: {sorted(rest)}")
    return fused(
        *(query, key, value),
        ends=actual_seq_lengths,
        lengths=actual_seq_lengths_kv,
        table=block_table,
        mask=atten_mask,
        q_heads=num_heads,
        kv_heads=num_key_value_heads,
        scale=scale,
        sparse_mode=sparse_mode,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        block_size=block_size,
    )


@body("npu::npu_fused_infer_attention_score.out")
def fused_infer_attention_score_out(*args: Any, out: Any, **kwargs: Any) -> Any:
    check(kwargs.get("workspace") is not None, "a captured call brings its workspace")
    found = fused_infer_attention_score(*args, **kwargs)
    for mine, theirs in zip(out, found, strict=True):
        mine.copy_(theirs)
    return tuple(out)


@body("npu::_npu_fused_infer_attention_score_get_max_workspace")
def max_workspace(query: Any, *args: Any, **kwargs: Any) -> Any:
    return query.new_empty(16, dtype=torch.uint8)


@body("npu::_npu_fused_infer_attention_score_infer_output")
def infer_output(query: Any, value: Any, **kwargs: Any) -> Any:
    return torch.full_like(query, math.nan), query.new_zeros(1, dtype=torch.float32)


@body("npu::npu_fused_infer_attention_score_v2")
def fused_infer_attention_score_v2(
    query: Any,
    key: Any,
    value: Any,
    *,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    atten_mask: Any = None,
    block_table: Any = None,
    learnable_sink: Any = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
) -> Any:
    return fused(
        *(query, key, value),
        ends=actual_seq_qlen,
        lengths=actual_seq_kvlen,
        table=block_table,
        mask=atten_mask,
        q_heads=num_query_heads,
        kv_heads=num_key_value_heads,
        scale=softmax_scale,
        sparse_mode=sparse_mode,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        block_size=block_size,
        sinks=learnable_sink,
    )


@body("npu::npu_rms_norm")
def rms_norm(x: Any, gamma: Any, epsilon: float = 1e-6) -> Any:
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * inverse).to(x.dtype) * gamma, inverse


@body("npu::npu_add_rms_norm")
def add_rms_norm(x1: Any, x2: Any, gamma: Any, epsilon: float = 1e-6) -> Any:
    total = x1 + x2
    return (*rms_norm(total, gamma, epsilon), total)


@body("npu::npu_rotary_mul")
def rotary_mul(x: Any, r1: Any, r2: Any, rotary_mode: str = "half", rotate: Any = None) -> Any:
    check(x.dim() == r1.dim() == 4 and x.dtype == r1.dtype, "four dimensions, one dtype")
    if rotary_mode == "half":
        a, b = x.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
    else:
        check(rotary_mode == "interleave", f"no rotary_mode {rotary_mode}")
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return r1 * x + r2 * turned


@body("npu::npu_swiglu")
def swiglu(x: Any, dim: int = -1) -> Any:
    a, b = x.chunk(2, dim)
    return torch.nn.functional.silu(a) * b
