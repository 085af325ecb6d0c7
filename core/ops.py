"""Portable torch bodies of `octavo.core.contract.Ops`: right on any torch device, fast on none.

They are what a new backend starts from and what every kernel is compared with. The KV cache of a
layer is a pair of tensors [blocks, block, heads, head size]; arithmetic is float32 or wider.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from octavo.core.contract import KVSpec, SampleInputs, StepOut, WeightSpec
from octavo.core.quantization import form
from octavo.core.quantization.base import QuantizedTensor
from octavo.core.types import Batch

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}

KVPair = tuple[torch.Tensor, torch.Tensor]
Weight = torch.Tensor | QuantizedTensor


@dataclass(slots=True)
class TorchInputs:
    """A batch as torch tensors, beside the host arrays that Python loops read."""

    batch: Batch
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: tuple[torch.Tensor, ...]  # per group [T] int64
    block_tables: tuple[torch.Tensor, ...]  # per group [S, blocks] int64
    logits_rows: torch.Tensor | None  # [L] int64; None: all of T in order
    extra: Any = None  # what a backend's own kernels want


def prepare(batch: Batch, prev: StepOut | None, device: str) -> TorchInputs:
    """Uploads a batch as torch tensors."""

    def up(array: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.asarray(array, np.int64))
        return tensor if device == "cpu" else tensor.to(device)

    return TorchInputs(
        batch=batch,
        token_ids=with_drawn(up(batch.token_ids), batch, prev, up),
        positions=up(batch.positions),
        slots=tuple(up(s) for s in batch.slots),
        block_tables=tuple(up(t) for t in batch.block_tables),
        logits_rows=up(batch.logits_rows),
    )


def with_drawn(
    token_ids: torch.Tensor,
    batch: Batch,
    prev: StepOut | None,
    upload: Callable[[np.ndarray[Any, Any]], torch.Tensor],
) -> torch.Tensor:
    """token_ids [T] with the tokens that the step before has drawn, which the host may not know yet."""
    if batch.token_src is None or prev is None or prev.tokens is None:
        return token_ids
    source = upload(batch.token_src.astype(np.int64))
    return torch.where(source >= 0, prev.tokens[source.clamp_min(0)], token_ids)


# ------------------------------------------------------------------------------------- KV cache


def kv_block_bytes(spec: KVSpec, block_size: int) -> int:
    width = DTYPES[spec.dtype].itemsize
    return block_size * spec.kv_heads * (spec.head_size + spec.head_size_v) * width


def alloc_kv(device: str, groups: Sequence[KVSpec], num_blocks: int, block_size: int) -> list[Any]:
    by_layer: dict[int, KVPair] = {}
    for spec in groups:
        for layer in spec.layers:
            shape = (num_blocks, block_size, spec.kv_heads)
            by_layer[layer] = (
                torch.empty(*shape, spec.head_size, dtype=DTYPES[spec.dtype], device=device),
                torch.empty(*shape, spec.head_size_v, dtype=DTYPES[spec.dtype], device=device),
            )
    return [by_layer[layer] for layer in sorted(by_layer)]


def write_kv(
    handle: KVPair, k: torch.Tensor, v: torch.Tensor, meta: TorchInputs, group: int
) -> KVPair:
    slots = meta.slots[group]
    if meta.batch.num_tokens < slots.numel() or bool((slots < 0).any()):
        keep = slots >= 0
        slots, k, v = slots[keep], k[keep], v[keep]
    for cache, new in zip(handle, (k, v), strict=True):
        cache.flatten(0, 1).index_copy_(0, slots, new.to(cache.dtype))
    return handle


def copy_blocks(handles: list[KVPair], pairs: Sequence[tuple[int, int]]) -> list[KVPair]:
    for source, target in pairs:
        for handle in handles:
            for cache in handle:
                cache[target].copy_(cache[source])
    return handles


def export_blocks(handles: list[KVPair], ids: Sequence[int]) -> torch.Tensor:
    rows = []
    for handle in handles:
        for cache in handle:
            index = torch.tensor(list(ids), dtype=torch.int64, device=cache.device)
            rows.append(cache[index].flatten(1).contiguous().view(torch.uint8).cpu())
    return torch.cat(rows, dim=1)


def import_blocks(src: torch.Tensor, handles: list[KVPair], ids: Sequence[int]) -> list[KVPair]:
    offset = 0
    for handle in handles:
        for cache in handle:
            size = cache[0].numel() * cache.element_size()
            part = src[:, offset : offset + size].contiguous().view(cache.dtype)
            index = torch.tensor(list(ids), dtype=torch.int64, device=cache.device)
            cache[index] = part.view(len(ids), *cache.shape[1:]).to(cache.device)
            offset += size
    return handles


# ------------------------------------------------------------------------------------ attention


def paged_attention(
    q: torch.Tensor,
    handle: KVPair,
    meta: TorchInputs,
    *,
    scale: float,
    group: int,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    k_cache, v_cache = handle
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    q_heads = q.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(q.shape[0], q_heads, v_cache.shape[3])
    starts, lens = meta.batch.query_start.tolist(), meta.batch.context_lens.tolist()
    for s, context in enumerate(lens):
        first, last = starts[s], starts[s + 1]
        if first == last:
            continue
        blocks = meta.block_tables[group][s, : -(-context // block_size)]
        keys = k_cache[blocks].flatten(0, 1)[:context].to(wide)  # [context, Hkv, D]
        values = v_cache[blocks].flatten(0, 1)[:context].to(wide)
        queries = q[first:last].to(wide).view(last - first, kv_heads, q_heads // kv_heads, -1)
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(context - (last - first), context, device=q.device)[:, None]
        key_at = torch.arange(context, device=q.device)[None, :]
        hidden = key_at > at
        if window > 0:
            hidden |= key_at <= at - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.to(wide).view(kv_heads, -1, 1, 1).expand(-1, -1, last - first, 1)
            weights = torch.softmax(torch.cat([scores, sink], -1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        mixed = torch.einsum("hgqk,khd->qhgd", weights, values)
        out[first:last] = mixed.flatten(1, 2).to(out.dtype)
    return out


def encoder_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: TorchInputs, *, scale: float
) -> torch.Tensor:
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    starts = meta.batch.query_start.tolist()
    shared = q.shape[1] != k.shape[1]
    for first, last in itertools.pairwise(starts):
        if first == last:
            continue
        a, b, c = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(a, b, c, scale=scale, enable_gqa=shared)
        out[first:last] = mixed[0].transpose(0, 1)
    return out


# --------------------------------------------------------------------------- the rest of a layer


def pack_weight(device: str, parts: Mapping[str, Weight], spec: WeightSpec, dtype: str) -> Weight:
    stacked = [parts[name] for name, _ in spec.parts]
    if spec.scheme is not None:
        kind = form(spec.scheme)
        return concatenated(
            [
                part if isinstance(part, QuantizedTensor) else kind.quantize(part, spec.group)
                for part in stacked
            ]
        ).to(device, DTYPES[dtype])
    floats = [part for part in stacked if not isinstance(part, QuantizedTensor)]
    assert len(floats) == len(stacked), f"codes for {spec.name}, which has no form"
    # Always a copy: the parts may be views of a file that is closed after loading.
    if len(floats) == 1:
        return floats[0].to(device=device, dtype=DTYPES[dtype], copy=True).contiguous()
    return torch.cat([part.to(device=device, dtype=DTYPES[dtype]) for part in floats])


def concatenated(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Matrices of one form and group, stacked; a copy."""
    first = parts[0]
    minima = None if first.minima is None else torch.cat([p.minima for p in parts])  # type: ignore[misc]
    return QuantizedTensor(
        first.form,
        torch.cat([p.codes for p in parts]),
        torch.cat([p.scales for p in parts]),
        minima,
        first.group,
        first.dtype,
    )


def weight_bytes(spec: WeightSpec, dtype: str) -> int:
    if spec.scheme is not None:
        return form(spec.scheme).nbytes(spec.shape, spec.group)
    return math.prod(spec.shape) * DTYPES[dtype].itemsize


def embedding(ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    if isinstance(weight, QuantizedTensor):
        return form(weight.form).dequantize(weight.rows(ids)).to(weight.dtype)
    return weight.index_select(0, ids)


def linear(
    x: torch.Tensor,
    weight: Weight,
    *,
    bias: torch.Tensor | None,
    reduce: str | None,
    lora: Any,
) -> torch.Tensor:
    if lora is not None:
        raise ValueError("this backend's linear op has no LoRA")
    if isinstance(weight, QuantizedTensor):
        out = form(weight.form).linear(x, weight)
        return out if bias is None else out + bias
    return F.linear(x, weight, bias)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * (offset + weight.to(wide.dtype))).to(x.dtype)
    return wide.to(x.dtype) * weight


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float) -> torch.Tensor:
    return _norm(x, weight, eps, offset)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = residual + x
    return _norm(residual, weight, eps, offset), residual


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    size = 2 * cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    wide = turned if turned.dtype == torch.float64 else turned.float()
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = wide.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1) if rest.shape[-1] else turned.to(x.dtype)


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, meta: TorchInputs, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin[meta.positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R/2]
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def act_and_mul(x: torch.Tensor, kind: Literal["silu", "gelu", "gelu_tanh"]) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    weight, bias = weight.to(wide.dtype), bias.to(wide.dtype)
    return F.layer_norm(wide, wide.shape[-1:], weight, bias, eps).to(x.dtype)


def activation(x: torch.Tensor, kind: Literal["gelu", "gelu_tanh", "relu"]) -> torch.Tensor:
    if kind == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


# ------------------------------------------------------------------------------------- sampling

_MASK = 0xFFFFFFFF
_DRAWN_TOGETHER = 1 << 16  # logits of rows that are drawn in one go: few calls, and little memory


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


def _mix32(h: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser on int64 tensors that hold 32-bit values."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def uniform_bits(seed: int, counter: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[vocab_size] float32 uniforms in (0, 1) from (seed, counter, vocabulary id) alone."""
    return uniform_rows([(seed, counter)], vocab_size, device)[0]


def uniform_rows(
    pairs: Sequence[tuple[int, int]], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """`uniform_bits` of many (seed, counter): float32 [pairs, vocab_size]."""
    keys = [_splitmix64((seed & (2**64 - 1)) ^ _splitmix64(counter)) for seed, counter in pairs]
    halves = torch.tensor([(key & _MASK, key >> 32) for key in keys], device=device)
    low, high = halves[:, :1], halves[:, 1:]
    h = torch.arange(vocab_size, dtype=torch.int64, device=device)
    h = ((h * 0x9E3779B1) + low) & _MASK
    h = _mix32(h ^ high)
    h = _mix32((h + high) & _MASK)
    return ((h >> 9).to(torch.float32) + 0.5) * 2.0**-23


def filter_row(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """One row [V] of logits already divided by temperature -> the same with dropped tokens at -inf."""
    out = row.clone()
    if 0 < top_k < row.numel():
        out[row < torch.topk(row, top_k).values[-1]] = float("-inf")
    if top_p < 1.0:
        values, order = torch.sort(out, descending=True, stable=True)
        before = torch.softmax(values.double(), dim=-1).cumsum(-1)
        before = before[:-1]  # of the most likely token it is nothing: that one always stays
        out[order[1:][before >= top_p]] = float("-inf")
    if min_p > 0.0:
        out[out < out.max() + float(np.log(min_p))] = float("-inf")
    return out


def sample(logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
    logits = logits.float()
    tokens = logits.argmax(-1)
    if not rows.all_greedy:
        filters = [t.tolist() for t in (rows.top_k, rows.top_p, rows.min_p)]
        pairs = list(zip(rows.seed.tolist(), rows.counter.tolist(), strict=True))
        drawn = [i for i, t in enumerate(rows.temperature.tolist()) if t > 0]
        vocab = logits.shape[1]
        together = max(1, _DRAWN_TOGETHER // vocab)
        for part in (drawn[at : at + together] for at in range(0, len(drawn), together)):
            scores = logits[part] / rows.temperature[part, None]
            for row, i in zip(scores, part, strict=True):
                top_k, top_p, min_p = (column[i] for column in filters)
                if 0 < top_k < vocab or top_p < 1 or min_p > 0:
                    row.copy_(filter_row(row, top_k, top_p, min_p))
            noise = -torch.log(
                -torch.log(uniform_rows([pairs[i] for i in part], vocab, logits.device))
            )
            tokens[part] = (scores + noise).argmax(-1)
    return _without_failures(logits, tokens)


def _without_failures(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """tokens [L], -1 where a logit of the row [V] is a NaN or all are minus infinity."""
    bad = logits.isnan().any(-1) | (logits.amax(-1) == float("-inf"))
    return torch.where(bad, torch.full_like(tokens, -1), tokens)


def _masked(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    keep = (bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    return logits[rows].masked_fill(~keep, float("-inf"))


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    logits[rows] = _masked(logits, rows, words)


def best_allowed(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    masked = _masked(logits, rows, words)
    tokens = _without_failures(masked, masked.argmax(-1))
    return torch.where(masked.amax(-1) == float("inf"), torch.full_like(tokens, -1), tokens)


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    norm = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(1, ids[:, None])
    return chosen[:, 0] - norm, (logits > chosen).sum(-1) + 1, norm
