"""Drawing tokens in plain XLA: nothing in it is sorted, and nothing is wider than 32 bits.

A chip without 64-bit arithmetic takes many minutes to compile sums and sorts of it. So filters are found by
bisection: of the 32 bits of a float, the highest first. The random bits are the portable ones of
`octavo.core.ops.uniform_bits`, whose 64-bit part is computed in halves.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Words = tuple[jax.Array, jax.Array]
"""Unsigned 64-bit numbers as (upper, lower) halves, uint32."""


def _word(value: int) -> jax.Array:
    return jnp.uint32(value)


def _times(x: Words, value: int) -> Words:
    """x · value modulo 2^64; of the lower halves' 64-bit product four 16-bit ones are made."""
    high, low = x
    ours, by = (low & 0xFFFF, low >> 16), (_word(value & 0xFFFF), _word(value >> 16 & 0xFFFF))
    least, most = ours[0] * by[0], ours[1] * by[1]
    cross = ours[0] * by[1], ours[1] * by[0]
    middle = (least >> 16) + (cross[0] & 0xFFFF) + (cross[1] & 0xFFFF)
    carried = most + (cross[0] >> 16) + (cross[1] >> 16) + (middle >> 16)
    upper = carried + high * _word(value & 0xFFFFFFFF) + low * _word(value >> 32)
    return upper, (middle << 16) | (least & 0xFFFF)


def _mixed_down(x: Words, by: int) -> Words:
    """x ^ (x >> by), by below 32."""
    high, low = x
    return high ^ (high >> by), low ^ ((low >> by) | (high << (32 - by)))


def _splitmix64(x: Words) -> Words:
    """The splitmix64 generator's step (Steele, Lea and Flood 2014)."""
    low = x[1] + _word(0x7F4A7C15)
    high = x[0] + _word(0x9E3779B9) + (low < x[1]).astype(jnp.uint32)
    x = _times(_mixed_down((high, low), 30), 0xBF58476D1CE4E5B9)
    x = _times(_mixed_down(x, 27), 0x94D049BB133111EB)
    return _mixed_down(x, 31)


def _mix32(h: jax.Array) -> jax.Array:
    """MurmurHash3's 32-bit finaliser."""
    h = (h ^ (h >> 16)) * _word(0x85EBCA6B)
    h = (h ^ (h >> 13)) * _word(0xC2B2AE35)
    return h ^ (h >> 16)


def uniforms(seed: Words, counter: Words, vocab: int) -> jax.Array:
    """Float32 in (0, 1), [L, vocab], for seeds and counters [L]."""
    mixed = _splitmix64(counter)
    high, low = (half[:, None] for half in _splitmix64((seed[0] ^ mixed[0], seed[1] ^ mixed[1])))
    ids = lax.broadcasted_iota(jnp.uint32, (1, vocab), 1)
    h = _mix32((ids * _word(0x9E3779B1) + low) ^ high)
    h = _mix32(h + high)
    # Through int32: a conversion from unsigned numbers takes more than one instruction on a TPU.
    return ((h >> 9).astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-23


def _ordered(x: jax.Array) -> jax.Array:
    """Floats as uint32 in the same order; the two zeros are one."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | _word(1 << 31))


def _total(weights: jax.Array) -> jax.Array:
    """[L, V] -> [L, 1], with the roundings of short sums: a chip may add one after another."""
    rows, size = weights.shape
    width = 128
    padded = jnp.pad(weights, ((0, 0), (0, -size % width)))
    return padded.reshape(rows, -1, width).sum(2).sum(1)[:, None]


def _border(
    keys: jax.Array, weights: jax.Array, target: jax.Array, wanted: jax.Array, bits: int
) -> jax.Array:
    """The largest key [L, 1] from which upwards weights [L, V] sum to the target [L, 1] or more; 0 if there is none,
    and, without looking, if no row is wanted [L, 1]."""

    def one(i: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | (_word(1) << (bits - 1 - i).astype(jnp.uint32))
        enough = _total(jnp.where(keys >= tried, weights, 0.0)) >= target
        return jnp.where(enough, tried, found)

    start = jnp.zeros(target.shape, jnp.uint32)
    found = lax.fori_loop(0, jnp.where(wanted.any(), bits, 0), one, start)
    return jnp.where(wanted, found, 0)


def filtered(values: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """values [L, V] by temperature, with -inf for each token that a filter [L, 1] drops.

    As the portable ops have it: equals of the k-th token stay; of equals at the border of top-p the lower ids do; the
    most likely token stays."""
    vocab = values.shape[1]
    keys, most = _ordered(values), values.max(-1, keepdims=True)
    limited = (top_k > 0) & (top_k < vocab)
    target = jnp.where(limited, top_k, vocab).astype(jnp.float32)
    kept = keys >= _border(keys, jnp.ones_like(values), target, limited, 32)

    weights = jnp.where(kept, jnp.exp(values - most), 0.0)
    mass = top_p * _total(weights)
    cut = top_p < 1.0
    least = jnp.minimum(_border(keys, weights, mass, cut, 32), _ordered(most))
    above = _total(jnp.where(keys > least, weights, 0.0))
    equal = kept & (keys == least)
    each = jnp.where(equal, weights, 0.0).max(-1, keepdims=True)
    # Of the equals the first that reaches the mass is the last to stay.
    count = jnp.maximum(jnp.ceil((mass - above) / each), 1.0)
    ones = equal.astype(jnp.float32)
    few = cut & (count < _total(ones))
    from_end = _word(vocab - 1) - lax.broadcasted_iota(jnp.uint32, (1, vocab), 1)
    last = _border(from_end, ones, count, few, vocab.bit_length())
    kept &= ~cut | (keys > least) | (equal & (from_end >= last))
    kept &= values >= most + jnp.log(min_p)  # log 0 is -inf: nothing lies below
    return jnp.where(kept, values, -jnp.inf)


def _valid(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    bad = jnp.isnan(logits).any(-1) | (logits == -jnp.inf).all(-1)
    return jnp.where(bad, -1, tokens)


def _first_of_most(scores: jax.Array) -> jax.Array:
    """argmax [L] int32 of [L, V], as two reductions of one operand: a TPU's compiler is quicker with them."""
    vocab = scores.shape[1]
    most = scores >= scores.max(-1, keepdims=True)
    ids = jnp.where(most, lax.broadcasted_iota(jnp.int32, scores.shape, 1), vocab).min(-1)
    return jnp.minimum(ids, vocab - 1)


def greedy(logits: jax.Array) -> jax.Array:
    """logits [L, V] float32 -> the most likely tokens [L] int32; -1 for a row with NaN or with -inf alone."""
    return _valid(logits, _first_of_most(logits))


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    numbers: jax.Array,
) -> jax.Array:
    """logits [L, V] float32 -> tokens [L] int32; greedy ones where the temperature [L] is 0.

    numbers [4, L] int32: the upper and lower half of each row's seed, then of its counter. top_k [L] int32, the other
    filters [L] float32, as in `SampleInputs`.
    """
    warm = temperature > 0
    values = logits / jnp.where(warm, temperature, 1.0)[:, None]
    kept = filtered(values, top_k[:, None], top_p[:, None], min_p[:, None])
    halves = lax.bitcast_convert_type(numbers, jnp.uint32)
    uniform = uniforms((halves[0], halves[1]), (halves[2], halves[3]), logits.shape[1])
    # Apart from the search for the largest: fused into it, noise takes three times as long to compile.
    drawn = _first_of_most(lax.optimization_barrier(kept - jnp.log(-jnp.log(uniform))))
    return _valid(logits, jnp.where(warm, drawn, _first_of_most(logits)))
