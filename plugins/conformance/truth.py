"""What the operations are, written down once more in float64 numpy from their definitions.

Nothing here calls the portable bodies: those are a backend like any other to this kit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
    causal: bool = True,
) -> Array:
    """The last n positions' q [n, Hq, D] over keys k [context, Hkv, D] and values v [context, Hkv, Dv].

    Query head h reads KV head h // (Hq / Hkv). Position p sees positions 0..p, or the last `window` of
    these; without `causal` all. sinks [Hq]: one more logit in each head's denominator, without a value.
    """
    n, heads, _ = q.shape
    context, kv_heads, _ = k.shape
    at = np.arange(context - n, context)[:, None]
    key_at = np.arange(context)[None, :]
    seen = (key_at <= at) | (not causal)
    if window:
        seen &= key_at > at - window
    out = np.zeros((n, heads, v.shape[2]))
    for h in range(heads):
        g = h // (heads // kv_heads)
        scores = q[:, h] @ k[:, g].T * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(seen, scores, -np.inf)
        most = scores.max(1, keepdims=True)
        if sinks is not None:
            most = np.maximum(most, sinks[h])
        weights = np.exp(scores - most)
        total = weights.sum(1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[h] - most)
        out[:, h] = weights / total @ v[:, g]
    return out


def rms_norm(x: Array, weight: Array, eps: float, offset: float) -> Array:
    """x / sqrt(mean(x²) + eps) · (offset + weight)."""
    result: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (offset + weight)
    return result


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias."""
    away = x - x.mean(-1, keepdims=True)
    result: Array = away / np.sqrt((away * away).mean(-1, keepdims=True) + eps) * weight + bias
    return result


def rotary(x: Array, cos_sin: Array, positions: NDArray[Any], interleaved: bool) -> Array:
    """x [T, H, D], of which the first R are turned by cos_sin [positions, R]. Pairs are (i, i + R/2), or
    (2i, 2i + 1) when interleaved."""
    half = cos_sin.shape[1] // 2
    out = x.copy()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos = cos_sin[positions, i][:, None]
        sin = cos_sin[positions, half + i][:, None]
        out[:, :, a] = x[:, :, a] * cos - x[:, :, b] * sin
        out[:, :, b] = x[:, :, b] * cos + x[:, :, a] * sin
    return out


_erf = np.vectorize(math.erf, otypes=[np.float64])


def activation(x: Array, kind: str) -> Array:
    """silu, gelu, gelu_tanh or relu."""
    if kind == "relu":
        return np.maximum(x, 0.0)
    if kind == "silu":
        result: Array = x / (1 + np.exp(-x))
        return result
    if kind == "gelu":
        result = 0.5 * x * (1 + _erf(x / math.sqrt(2)))
        return result
    result = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


def act_and_mul(x: Array, kind: str) -> Array:
    """act(x[:, :n]) · x[:, n:]."""
    half = x.shape[1] // 2
    return activation(x[:, :half], kind) * x[:, half:]


def logprobs(logits: Array, ids: NDArray[Any]) -> tuple[Array, NDArray[Any], Array]:
    """Log-softmax of ids [L], their ranks, and the rows' logsumexp."""
    most = logits.max(-1, keepdims=True)
    norm = most[:, 0] + np.log(np.exp(logits - most).sum(-1))
    chosen = logits[np.arange(len(ids)), ids]
    return chosen - norm, (logits > chosen[:, None]).sum(-1) + 1, norm


# ------------------------------------------------------------------------------------- sampling

_GOLDEN, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def _splitmix(x: int) -> int:
    z = (x + _GOLDEN) & _WORD
    z = ((z ^ (z >> 30)) * _M1) & _WORD
    z = ((z ^ (z >> 27)) * _M2) & _WORD
    return z ^ (z >> 31)


def _murmur(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ (h >> np.uint32(13))
    h = h * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def gumbel(seed: int, counter: int, vocab: int) -> Array:
    """The noise [vocab] of a draw: what a seeded request's tokens hang on, whatever runs it."""
    key = _splitmix((seed & _WORD) ^ _splitmix(counter & _WORD))
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    ids = np.arange(vocab, dtype=np.uint32)
    h = _murmur((ids * np.uint32(0x9E3779B1) + low) ^ high)
    h = _murmur(h + high)
    uniform = ((h >> np.uint32(9)).astype(np.float64) + 0.5) / (1 << 23)
    result: Array = -np.log(-np.log(uniform))
    return result


def kept(row: Array, top_k: int, top_p: float, min_p: float) -> NDArray[np.bool_]:
    """Which tokens a row [V], already divided by the temperature, may still give: top-k, then of these
    the fewest most likely whose probability reaches top_p, then those of at least min_p · the largest."""
    keep = np.isfinite(row)
    if 0 < top_k < len(row):
        keep &= row >= np.sort(row)[-top_k]
    if top_p < 1:
        order = np.argsort(-np.where(keep, row, -np.inf), kind="stable")
        weights = np.where(keep, np.exp(row - row[keep].max()), 0.0)[order]
        before = np.concatenate([[0.0], np.cumsum(weights / weights.sum())[:-1]])
        out = before >= top_p
        out[0] = False
        keep[order[out]] = False
    if min_p > 0:
        keep &= row >= row[keep].max() + math.log(min_p)
    return keep
