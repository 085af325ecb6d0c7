"""CPU kernels: a C++ library behind a plain C ABI, called through ctypes.

The library holds the same kernels for several instruction sets and picks one at load. All of them
share one pool of threads (:func:`set_threads`).

The functions here trust their arguments: a wrong shape or a freed tensor is undefined behaviour.
What holds for a whole step is prepared (and validated) once, as :class:`AttentionStep` and
:class:`WriteStep`; :mod:`octavo.kernels.cpu.checked` has the same functions with every argument
verified. Tensors are torch tensors on the CPU in float32, bfloat16 or float16, whose last dimension
is contiguous; importing this module imports no torch.

The KV cache of a layer is two tensors, laid out for the kernels (see :func:`kv_shapes`); a linear
weight is packed once (see :class:`PackedWeight`).
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Final

from octavo.kernels.cpu.library import (
    BF16,
    F16,
    F32,
    INT4,
    INT8,
    address,
    available,
    dtype_code,
    fail,
    force_isa,
    isa,
    isas,
    lib,
    why_unavailable,
)
from octavo.kernels.cpu.steps import (
    BLOCK_MULTIPLE,
    HEAD_MULTIPLE,
    AttentionLayer,
    AttentionStep,
    WriteStep,
    kv_shapes,
)
from octavo.kernels.cpu.threads import core_count, set_threads, threading, threads
from octavo.kernels.cpu.weights import (
    PACKING,
    DecoderEnds,
    DecoderLayer,
    LayerStack,
    LayerStep,
    PackedWeight,
    decoder_layers,
    decoder_logits,
    linear,
    unpack_rows,
)

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.cpu.library import HostArray

NEOX, INTERLEAVED = 0, 1
ACTIVATIONS: Final = {"silu": 0, "gelu": 1, "gelu_tanh": 2}

__all__ = [
    "ACTIVATIONS",
    "BF16",
    "BLOCK_MULTIPLE",
    "F16",
    "F32",
    "HEAD_MULTIPLE",
    "INT4",
    "INT8",
    "INTERLEAVED",
    "NEOX",
    "PACKING",
    "AttentionLayer",
    "AttentionStep",
    "DecoderEnds",
    "DecoderLayer",
    "LayerStack",
    "LayerStep",
    "PackedWeight",
    "WriteStep",
    "act_and_mul",
    "add_rms_norm",
    "available",
    "best_allowed",
    "copy_blocks",
    "core_count",
    "decoder_layers",
    "decoder_logits",
    "dtype_code",
    "force_isa",
    "gather_blocks",
    "isa",
    "isas",
    "kv_shapes",
    "linear",
    "mask_logits",
    "paged_attention",
    "rms_norm",
    "rotary",
    "sample",
    "scatter_blocks",
    "set_threads",
    "threading",
    "threads",
    "token_logprobs",
    "unpack_rows",
    "why_unavailable",
    "write_kv",
]


def write_kv(step: WriteStep, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k [T, kv_heads, head_size] and v [T, kv_heads, head_size_v] at the step's slots."""
    status = lib.write_kv(
        step.address, k_cache.data_ptr(), v_cache.data_ptr(), k.data_ptr(), v.data_ptr()
    )
    if status:
        fail(status, "write_kv")


def paged_attention(
    step: AttentionStep,
    layer: AttentionLayer,
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    """out [T, q_heads, head_size_v] = causal attention of q [T, q_heads, head_size].

    A row's bits depend neither on the batch nor on chunking nor on the number of threads. Rows from
    query_start[S] on are left alone.
    """
    status = lib.paged_attention(
        step.address,
        layer.address,
        out.data_ptr(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
    )
    if status:
        fail(status, "paged_attention")


def _block_sizes(cache: Tensor) -> tuple[int, int]:
    """Bytes of a block, which are contiguous, and from one to the next."""
    size = cache.element_size()
    return math.prod(cache.shape[1:]) * size, cache.stride(0) * size


def copy_blocks(cache: Tensor, pairs: HostArray) -> None:
    """Copy blocks inside a K or V cache, in order; `pairs` int64 [n, 2]: source, destination."""
    lib.copy_blocks(cache.data_ptr(), *_block_sizes(cache), address(pairs), len(pairs))


def gather_blocks(out: Tensor, cache: Tensor, ids: HostArray) -> None:
    """Copy blocks `ids` int64 [n] of a K or V cache to the contiguous `out` [n, ...]."""
    lib.gather_blocks(
        out.data_ptr(), cache.data_ptr(), *_block_sizes(cache), address(ids), len(ids)
    )


def scatter_blocks(cache: Tensor, data: Tensor, ids: HostArray) -> None:
    """Copy the contiguous `data` [n, ...] to blocks `ids` int64 [n] of a K or V cache."""
    lib.scatter_blocks(
        cache.data_ptr(), data.data_ptr(), *_block_sizes(cache), address(ids), len(ids)
    )


_NORM = struct.Struct("=7q2i2f")


def _norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> bytes:
    if x.ndim == 2:
        rows, n = x.shape
        heads, out_head, x_head = 1, 0, 0
    else:
        rows, heads, n = x.shape
        out_head, x_head = out.stride(1), x.stride(1)
    return _NORM.pack(
        rows,
        heads,
        n,
        out.stride(0),
        out_head,
        x.stride(0),
        x_head,
        dtype_code(x.dtype),
        dtype_code(weight.dtype),
        eps,
        offset,
    )


def rms_norm(
    out: Tensor, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> None:
    """out = x / rms(x) * (weight + weight_offset) over the last dimension of x [T, n] or [T, H, n].

    `out` may be `x`. Weights may be of another dtype; the result is rounded once.
    """
    packed = _norm(out, x, weight, eps, weight_offset)
    status = lib.rms_norm(packed, out.data_ptr(), x.data_ptr(), weight.data_ptr())
    if status:
        fail(status, "rms_norm")


def add_rms_norm(
    out: Tensor,
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    """residual += x, then out = rms_norm(residual); all [T, n]; `out` may be `x`."""
    status = lib.add_rms_norm(
        _norm(out, x, weight, eps, weight_offset),
        out.data_ptr(),
        residual.data_ptr(),
        residual.stride(0),
        x.data_ptr(),
        weight.data_ptr(),
    )
    if status:
        fail(status, "add_rms_norm")


def rotary(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, head_size: int, style: int = NEOX
) -> None:
    """Rotate q and k in place; rows hold heads of `head_size` side by side ([T, H * D] or [T, H, D]).

    `positions` int32 or int64 [T] (negative: leave the row alone); `cos_sin` float32
    [max_position, rotary_dim], cosines then sines.
    """
    status = lib.rotary(
        q.data_ptr(),
        k.data_ptr(),
        positions.data_ptr(),
        positions.element_size() == 8,
        cos_sin.data_ptr(),
        positions.shape[0],
        q[0].numel() // head_size if q.ndim == 2 else q.shape[1],
        k[0].numel() // head_size if k.ndim == 2 else k.shape[1],
        head_size,
        cos_sin.shape[1],
        q.stride(0),
        k.stride(0),
        style,
        dtype_code(q.dtype),
    )
    if status:
        fail(status, "rotary")


def act_and_mul(out: Tensor, gate_up: Tensor, kind: str = "silu") -> None:
    """out [T, n] = act(gate) * up for gate_up [T, 2n]; kind: silu, gelu or gelu_tanh."""
    rows, n = out.shape
    status = lib.act_and_mul(
        out.data_ptr(),
        gate_up.data_ptr(),
        rows,
        n,
        out.stride(0),
        gate_up.stride(0),
        ACTIVATIONS[kind],
        dtype_code(gate_up.dtype),
    )
    if status:
        fail(status, "act_and_mul")


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
    """Draw out int64 [B] from float32 logits [B, V]; each setting is an array [B] or None (off).

    `temperature` float32 (0: greedy, the lowest id on ties; None: 1), `top_k` int32 (0: off; ties
    with the k-th logit are kept), `top_p` float32 (1: off; the fewest most probable tokens that
    reach it, with those that tie with the last), `min_p` float32 (0: off), `seed` and `counter`
    uint64 (or int64 of the same bits). -inf logits are never chosen; -1 for a row of only -inf, or
    with a NaN. Rows must be contiguous.
    """
    status = lib.sample(
        out.data_ptr(),
        logits.data_ptr(),
        logits.shape[0],
        logits.shape[1],
        logits.stride(0),
        None if temperature is None else address(temperature),
        None if top_k is None else address(top_k),
        None if top_p is None else address(top_p),
        None if min_p is None else address(min_p),
        None if seed is None else address(seed),
        None if counter is None else address(counter),
    )
    if status:
        fail(status, "sample")


def _mask(logits: Tensor, rows: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    rows, words = rows.contiguous(), words.contiguous()
    wanted = (len(rows), -(-logits.shape[1] // 32))
    if words.shape != wanted:
        raise ValueError(f"words are {tuple(words.shape)}, not {wanted}")
    return rows, words


def best_allowed(out: Tensor, logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """out int64 [R]: of row rows[i] (int64 [R]) of float32 logits [B, V] the largest logit's token (the
    lowest such id) among those whose bit v % 32 of words[i, v // 32] (int32 [R, ceil(V / 32)]) is 1; -1
    if there is none, it is not finite, or one is a NaN.
    """
    rows, words = _mask(logits, rows, words)
    status = lib.best_allowed(
        out.data_ptr(),
        logits.data_ptr(),
        logits.shape[1],
        logits.stride(0),
        rows.data_ptr(),
        words.data_ptr(),
        words.shape[1],
        len(rows),
    )
    if status:
        fail(status, "best_allowed")


def mask_logits(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Sets to -inf what of float32 logits [B, V] may not be drawn, in place: of row rows[i] (int64 [R])
    the tokens v whose bit v % 32 of words[i, v // 32] (int32 [R, ceil(V / 32)]) is 0.
    """
    rows, words = _mask(logits, rows, words)
    lib.mask_logits(
        logits.data_ptr(),
        logits.shape[1],
        logits.stride(0),
        rows.data_ptr(),
        words.data_ptr(),
        words.shape[1],
        len(rows),
    )


def token_logprobs(
    logprob: Tensor, rank: Tensor, logsumexp: Tensor, logits: Tensor, ids: Tensor
) -> None:
    """Of float32 logits [B, V] and ids int64 [B]: the id's log-probability (float32 [B]), its rank
    (int64 [B]: 1 + the number of tokens with a larger logit) and logsumexp (float32 [B]).
    """
    status = lib.token_logprobs(
        logprob.data_ptr(),
        rank.data_ptr(),
        logsumexp.data_ptr(),
        logits.data_ptr(),
        ids.data_ptr(),
        logits.shape[0],
        logits.shape[1],
        logits.stride(0),
    )
    if status:
        fail(status, "token_logprobs")
