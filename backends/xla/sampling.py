"""Drawing tokens with static shapes: the portable draw, for all rows at once and without a host in between.

The numbers are those of `octavo.core.ops`: noise from (seed, counter, vocabulary id) alone. A chip without 64-bit
floats sums probabilities for top-p in 32, so a token exactly at that border may be kept or dropped otherwise.
"""

from __future__ import annotations

import torch

from octavo.plugins import SampleInputs

_MASK = 0xFFFFFFFF


def _shifted(x: torch.Tensor, by: int, bits: int) -> torch.Tensor:
    """x >> by, with zeros coming in from above. The operator itself is a division in torch_xla."""
    return torch.bitwise_right_shift(x, by) & ((1 << (bits - by)) - 1)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    x = x + _signed(0x9E3779B97F4A7C15, 64)
    x = (x ^ _shifted(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shifted(x, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shifted(x, 31, 64)


def _mix32(h: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser on int32, whose products wrap around."""
    h = h ^ _shifted(h, 16, 32)
    h = h * _signed(0x85EBCA6B, 32)
    h = h ^ _shifted(h, 13, 32)
    h = h * _signed(0xC2B2AE35, 32)
    return h ^ _shifted(h, 16, 32)


def uniforms(seed: torch.Tensor, counter: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Float32 in (0, 1) for seed [L], counter [L] and vocabulary ids [L, V], all int64."""
    key = _splitmix64(seed ^ _splitmix64(counter))
    low, high = (_low32(key)[:, None], _low32(_shifted(key, 32, 64))[:, None])
    h = ids.to(torch.int32) * _signed(0x9E3779B1, 32) + low
    h = _mix32(h ^ high)
    h = _mix32(h + high)
    return (_shifted(h, 9, 32).to(torch.float32) + 0.5) * 2.0**-23


def _low32(x: torch.Tensor) -> torch.Tensor:
    """The lower half of int64 as int32, whatever a conversion does with what does not fit."""
    half = x & _MASK
    return torch.where(half > 0x7FFFFFFF, half - (1 << 32), half).to(torch.int32)


def sample(logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
    """logits [L, V] -> tokens [L] int64, as `Ops.sample` says."""
    logits = logits.float()
    greedy = logits.argmax(-1)
    tokens = greedy if rows.all_greedy else _drawn(logits, rows, greedy)
    # Not by the largest: in torch_xla a maximum begins at the lowest finite number.
    bad = logits.isnan().any(-1) | ~(logits > float("-inf")).any(-1)
    return torch.where(bad, torch.full_like(tokens, -1), tokens)


def _drawn(logits: torch.Tensor, rows: SampleInputs, greedy: torch.Tensor) -> torch.Tensor:
    vocab = logits.shape[1]
    warm = rows.temperature > 0
    scaled = (
        logits / torch.where(warm, rows.temperature, torch.ones_like(rows.temperature))[:, None]
    )
    # In falling order a filter is a cut: everything from some place on goes.
    values, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    top_k = torch.where((rows.top_k > 0) & (rows.top_k < vocab), rows.top_k, vocab).long()
    least = values.gather(1, top_k[:, None] - 1)
    minus = torch.full_like(values, float("-inf"))
    values = torch.where(values < least, minus, values)
    before = torch.softmax(values.double(), dim=-1).cumsum(-1)[:, :-1]
    beyond = (before >= rows.top_p[:, None]) & (rows.top_p < 1.0)[:, None]
    dropped = torch.cat((torch.zeros_like(beyond[:, :1]), beyond), dim=1)
    values = torch.where(dropped, minus, values)
    floor = values[:, :1] + rows.min_p.log()[:, None]  # log 0 is -inf: nothing lies below
    values = torch.where(values < floor, minus, values)
    noise = -torch.log(-torch.log(uniforms(rows.seed, rows.counter, order)))
    drawn = order.gather(1, (values + noise).argmax(-1)[:, None])[:, 0]
    return torch.where(warm, drawn, greedy)
