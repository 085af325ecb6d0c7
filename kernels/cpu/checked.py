"""The functions of :mod:`octavo.kernels.cpu` with every argument verified first.

For tests and for hunting a bug in a caller: a call costs many times a bare one. What the kernels
would do with a wrong shape, stride, dtype, slot, block or position is here a ValueError.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from octavo.kernels import cpu
from octavo.kernels.cpu.library import host, kv_dtype_code

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.cpu import AttentionLayer, AttentionStep, WriteStep
    from octavo.kernels.cpu.library import HostArray


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _tensor(t: Tensor, name: str, shape: tuple[int | None, ...], dtype: Any = None) -> None:
    actual = tuple(t.shape)
    fits = len(actual) == len(shape) and all(
        b in (None, a) for a, b in zip(actual, shape, strict=True)
    )
    _need(fits, f"{name} is {actual}, not {shape}")
    _need(t.device.type == "cpu", f"{name} is on {t.device}, not the CPU")
    _need(dtype is None or t.dtype == dtype, f"{name} is {t.dtype}, not {dtype}")
    inner = t.shape[-1]
    _need(inner <= 1 or t.stride(-1) == 1, f"{name}'s last dimension is not contiguous")


def _heads(t: Tensor, name: str, rows: int, heads: int, size: int, stride: int, code: int) -> None:
    """t is [T, heads * size] or [T, heads, size] with heads side by side; T >= rows."""
    shape = (None, heads * size) if t.ndim == 2 else (None, heads, size)
    _tensor(t, name, shape)
    _need(t.shape[0] >= rows, f"{name} has {t.shape[0]} rows, the step {rows}")
    _need(t.ndim == 2 or heads == 1 or t.stride(1) == size, f"{name}'s heads are not adjacent")
    _need(
        rows <= 1 or t.stride(0) == stride, f"{name}'s rows are {t.stride(0)} apart, not {stride}"
    )
    _need(cpu.dtype_code(t.dtype) == code, f"{name} is {t.dtype}, not what the step says")


def _cache(t: Tensor, name: str, shape: tuple[int, ...], code: int, stride: int) -> int:
    _tensor(t, name, (None, *shape))
    _need(t[:1].is_contiguous(), f"{name}'s blocks are not contiguous")
    apart = stride or math.prod(shape)
    _need(t.stride(0) == apart, f"{name}'s blocks are {t.stride(0)} apart, not {apart}")
    _need(kv_dtype_code(t.dtype) == code, f"{name} is {t.dtype}, not what the step says")
    return int(t.shape[0])


def _caches(step: AttentionStep | WriteStep, k_cache: Tensor, v_cache: Tensor) -> int:
    shapes = cpu.kv_shapes(
        1,
        step.kv_heads,
        step.head_size,
        step.head_size_v,
        step.block_size,
        scales=step.kv_dtype == cpu.INT8,
    )
    blocks = _cache(k_cache, "k_cache", shapes[0][1:], step.kv_dtype, step.k_block_stride)
    also = _cache(v_cache, "v_cache", shapes[1][1:], step.kv_dtype, step.v_block_stride)
    _need(blocks == also, f"k_cache has {blocks} blocks and v_cache {also}")
    return blocks


def _numbers(array: HostArray) -> list[Any]:
    return list(array.tolist())


def write_kv(step: WriteStep, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> None:
    """See :func:`octavo.kernels.cpu.write_kv`."""
    blocks = _caches(step, k_cache, v_cache)
    n, heads = step.tokens, step.kv_heads
    _heads(k, "k", n, heads, step.head_size, step.k_row_stride, step.x_dtype)
    _heads(v, "v", n, heads, step.head_size_v, step.v_row_stride, step.x_dtype)
    used = [slot for slot in _numbers(step.keep) if slot >= 0]
    _need(all(s < blocks * step.block_size for s in used), f"a slot is outside {blocks} blocks")
    _need(len(set(used)) == len(used), "two tokens want the same slot")
    cpu.write_kv(step, k_cache, v_cache, k, v)


def paged_attention(
    step: AttentionStep,
    layer: AttentionLayer,
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    """See :func:`octavo.kernels.cpu.paged_attention`."""
    blocks = _caches(step, k_cache, v_cache)
    tables, starts, contexts = (_numbers(a) for a in step.keep)
    _need(starts[0] >= 0, "query_start begins below 0")
    for s, (a, b) in enumerate(pairwise(starts)):
        _need(a <= b, f"query_start decreases at sequence {s}")
        if a == b:
            continue
        _need(contexts[s] >= b - a, f"sequence {s}: {b - a} queries in {contexts[s]} positions")
        first = max(0, contexts[s] - (b - a) + 1 - layer.window) if layer.window else 0
        size = step.block_size
        seen = tables[s][first // size : (contexts[s] + size - 1) // size]
        _need(contexts[s] <= len(tables[s]) * size, f"sequence {s}: its block table is too short")
        _need(all(0 <= b < blocks for b in seen), f"sequence {s}: a block is not in the cache")
    d, dv, heads = step.head_size, step.head_size_v, step.q_heads
    _heads(q, "q", starts[-1], heads, d, step.q_row_stride, step.x_dtype)
    _heads(out, "out", starts[-1], heads, dv, step.out_row_stride, step.x_dtype)
    if layer.keep is not None:
        _tensor(layer.keep, "sinks", (heads,))
    cpu.paged_attention(step, layer, out, q, k_cache, v_cache)


def _blocks(cache: Tensor, ids: HostArray, dimensions: int) -> None:
    _need(cache[:1].is_contiguous(), "the cache's blocks are not contiguous")
    host(ids, "block ids", "int64", dimensions)
    flat = [i for row in _numbers(ids) for i in (row if dimensions == 2 else [row])]
    _need(all(0 <= i < cache.shape[0] for i in flat), f"a block is outside {cache.shape[0]}")


def copy_blocks(cache: Tensor, pairs: HostArray) -> None:
    """See :func:`octavo.kernels.cpu.copy_blocks`."""
    _blocks(cache, pairs, 2)
    _need(tuple(pairs.shape[1:]) == (2,), "pairs are not [n, 2]")
    cpu.copy_blocks(cache, pairs)


def gather_blocks(out: Tensor, cache: Tensor, ids: HostArray) -> None:
    """See :func:`octavo.kernels.cpu.gather_blocks`."""
    _blocks(cache, ids, 1)
    _tensor(out, "out", (len(ids), *cache.shape[1:]), cache.dtype)
    _need(out.is_contiguous(), "out is not contiguous")
    cpu.gather_blocks(out, cache, ids)


def scatter_blocks(cache: Tensor, data: Tensor, ids: HostArray) -> None:
    """See :func:`octavo.kernels.cpu.scatter_blocks`."""
    _blocks(cache, ids, 1)
    _tensor(data, "data", (len(ids), *cache.shape[1:]), cache.dtype)
    _need(data.is_contiguous(), "data is not contiguous")
    _need(len(set(_numbers(ids))) == len(ids), "two blocks want the same place")
    cpu.scatter_blocks(cache, data, ids)


def rms_norm(
    out: Tensor, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> None:
    """See :func:`octavo.kernels.cpu.rms_norm`."""
    _need(x.ndim in (2, 3), "x is neither [T, n] nor [T, H, n]")
    _tensor(x, "x", tuple(x.shape))
    _tensor(out, "out", tuple(x.shape), x.dtype)
    _tensor(weight, "weight", (x.shape[-1],))
    cpu.rms_norm(out, x, weight, eps, weight_offset)


def add_rms_norm(
    out: Tensor,
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    """See :func:`octavo.kernels.cpu.add_rms_norm`."""
    _tensor(x, "x", (None, None))
    _tensor(out, "out", tuple(x.shape), x.dtype)
    _tensor(residual, "residual", tuple(x.shape), x.dtype)
    _tensor(weight, "weight", (x.shape[-1],))
    cpu.add_rms_norm(out, residual, x, weight, eps, weight_offset)


def rotary(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    head_size: int,
    style: int = cpu.NEOX,
) -> None:
    """See :func:`octavo.kernels.cpu.rotary`."""
    n, dim = positions.shape[0], cos_sin.shape[1]
    _need(str(positions.dtype) in ("torch.int32", "torch.int64"), "positions are not integers")
    _need(positions.is_contiguous() and cos_sin.is_contiguous(), "positions or cos_sin have gaps")
    _need(str(cos_sin.dtype) == "torch.float32", "cos_sin is not float32")
    _need(dim % 2 == 0 and dim <= head_size, f"rotary dim {dim} does not fit {head_size}")
    top = max(_numbers(positions), default=-1)
    _need(top < cos_sin.shape[0], f"position {top} is past the table's {cos_sin.shape[0]}")
    _need(style in (cpu.NEOX, cpu.INTERLEAVED), f"no rotary style {style}")
    for name, t in (("q", q), ("k", k)):
        heads = t[0].numel() // head_size
        _heads(t, name, n, heads, head_size, t.stride(0), cpu.dtype_code(q.dtype))
    cpu.rotary(q, k, positions, cos_sin, head_size=head_size, style=style)


def act_and_mul(out: Tensor, gate_up: Tensor, kind: str = "silu") -> None:
    """See :func:`octavo.kernels.cpu.act_and_mul`."""
    _need(kind in cpu.ACTIVATIONS, f"no activation {kind!r} among {list(cpu.ACTIVATIONS)}")
    _tensor(gate_up, "gate_up", (None, None))
    _tensor(out, "out", (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
    _need(gate_up.shape[1] % 2 == 0, "gate_up has an odd width")
    cpu.act_and_mul(out, gate_up, kind)


def sample(
    out: Tensor,
    logits: Tensor,
    *,
    temperature: HostArray | None = None,
    top_k: HostArray | None = None,
    top_p: HostArray | None = None,
    min_p: HostArray | None = None,
    seed: HostArray | None = None,
    counter: HostArray | None = None,
) -> None:
    """See :func:`octavo.kernels.cpu.sample`."""
    _tensor(logits, "logits", (None, None))
    _need(str(logits.dtype) == "torch.float32", f"logits are {logits.dtype}, not float32")
    rows = logits.shape[0]
    for name, array, kinds in (
        ("out", out, ("int64",)),
        ("temperature", temperature, ("float32",)),
        ("top_k", top_k, ("int32",)),
        ("top_p", top_p, ("float32",)),
        ("min_p", min_p, ("float32",)),
        ("seed", seed, ("int64", "uint64")),
        ("counter", counter, ("int64", "uint64")),
    ):
        if array is not None:
            kind = str(array.dtype).removeprefix("torch.")
            _need(kind in kinds, f"{name} is {kind}, not {kinds[0]}")
            host(array, name, kind, 1)
            _need(len(array) == rows, f"{name} has {len(array)} values for {rows} rows")
    cpu.sample(
        out,
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        counter=counter,
    )
