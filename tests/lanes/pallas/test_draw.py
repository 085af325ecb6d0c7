"""The draw against its definition in numpy, and compiled for every TPU that libtpu describes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_compile

from octavo.kernels.pallas import draw


def splitmix64(x: Any) -> Any:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix32(h: Any) -> Any:
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def uniforms(seed: Any, counter: Any, vocab: int) -> Any:
    key = splitmix64(seed ^ splitmix64(counter))
    low, high = (
        (key & np.uint64(0xFFFFFFFF)).astype(np.uint32),
        (key >> np.uint64(32)).astype(np.uint32),
    )
    h = np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B1) + low[:, None]
    h = mix32(mix32(h ^ high[:, None]) + high[:, None])
    return ((h >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def kept(row: Any, top_k: int, top_p: float, min_p: float) -> Any:
    """Which tokens the filters leave, in float64."""
    left = np.ones(len(row), bool)
    if 0 < top_k < len(row):
        left &= row >= np.sort(row)[-top_k]
    if top_p < 1:
        weights = np.where(left, np.exp(row.astype(np.float64) - row.max()), 0)
        order = np.argsort(-np.where(left, row, -np.inf), kind="stable")
        before = np.cumsum(weights[order]) / weights.sum()
        left[order[1:][before[:-1] >= top_p]] = False
    if min_p > 0:
        left &= row >= np.float32(row.max() + np.float32(np.log(min_p)))
    return left


def halves(x: Any) -> Any:
    return jnp.asarray((x >> np.uint64(32)).astype(np.uint32)), jnp.asarray(x.astype(np.uint32))


EDGES = [0, 1, 2**64 - 1, 2**63, 2**63 - 1, 2**32, 2**32 - 1, 0x9E3779B97F4A7C15]


def test_noise_is_bit_for_bit_the_portable_one() -> None:
    dice = np.random.default_rng(3)
    seeds = np.concatenate([np.array(EDGES, np.uint64), dice.integers(0, 2**64, 40, np.uint64)])
    counters = np.concatenate(
        [dice.integers(0, 5000, 40), [0, 1, 2, 2**32 - 1, 2**32, 2**40, 3, 4]]
    )
    counters = counters.astype(np.uint64)
    got = jax.jit(draw.uniforms, static_argnums=2)(halves(seeds), halves(counters), 4099)
    np.testing.assert_array_equal(np.asarray(got), uniforms(seeds, counters, 4099))


@pytest.mark.parametrize("vocab", [5, 128, 997, 4096])
@pytest.mark.parametrize("kind", ["distinct", "equals", "masked"])
def test_filters(kind: str, vocab: int) -> None:
    """equals: rounded so coarsely that borders lie among tokens of one logit."""
    dice = np.random.default_rng(vocab)
    rows = 96
    values = (dice.standard_normal((rows, vocab)) * 3).astype(np.float32)
    if kind == "equals":
        values = np.round(values)
        values[::7] = -0.0
        values[::7, ::3] = 0.0
    if kind == "masked":
        values[:, vocab // 2 :] = -np.inf
    top_k = dice.choice([0, 1, 3, 50, 2 * vocab], rows).astype(np.int32)
    top_p = dice.choice([1.0, 0.97, 0.61, 0.13, 1e-9], rows).astype(np.float32)
    min_p = dice.choice([0.0, 0.03, 1.0], rows).astype(np.float32)
    given = [jnp.asarray(x)[:, None] for x in (top_k, top_p, min_p)]
    got = np.asarray(jax.jit(draw.filtered)(jnp.asarray(values), *given))
    for i, row in enumerate(values):
        left = kept(row, int(top_k[i]), float(top_p[i]), float(min_p[i]))
        np.testing.assert_array_equal(got[i], np.where(left, row, -np.inf), str(i))


def sample(logits: Any, temperature: Any, seeds: Any, counters: Any) -> Any:
    rows = len(logits)
    ones, none = np.ones(rows, np.float32), np.zeros(rows, np.float32)
    numbers = jnp.stack((*halves(seeds), *halves(counters))).view(jnp.int32)
    given = (jnp.asarray(x) for x in (logits, temperature, none.astype(np.int32), ones, none))
    return np.asarray(jax.jit(draw.sample)(*given, numbers))


def test_draws() -> None:
    """Warm rows by their noise, cold ones the first of the most likely, -1 where nothing can be drawn."""
    dice = np.random.default_rng(8)
    logits = (dice.standard_normal((24, 997)) * 3).astype(np.float32)
    temperature = np.array([0.0, 0.7, 1.0] * 8, np.float32)
    seeds, counters = dice.integers(0, 2**64, 24, np.uint64), np.arange(24).astype(np.uint64)
    logits[0, [3, 700]] = 50.0
    noise = -np.log(-np.log(uniforms(seeds, counters, 997).astype(np.float64)))
    warm = temperature > 0
    wanted = np.where(
        warm,
        (logits / np.where(warm, temperature, 1)[:, None] + noise).argmax(-1),
        logits.argmax(-1),
    )
    assert wanted[0] == 3
    for row in (3, 4):
        logits[row] = -np.inf
    logits[6, 5] = logits[7, 5] = np.nan
    wanted[[3, 4, 6, 7]] = -1
    np.testing.assert_array_equal(sample(logits, temperature, seeds, counters), wanted)
    cold = np.asarray(jax.jit(draw.greedy)(jnp.asarray(logits)))
    best = np.where(wanted == -1, -1, np.nan_to_num(logits, nan=-np.inf).argmax(-1))
    np.testing.assert_array_equal(cold, best)


@pytest.mark.parametrize("chip", tpu_compile.CHIPS)
def test_compiles(chip: str, compile_for: Any) -> None:
    rows, vocab = 16, 32000
    each = [((rows,), kind) for kind in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
    text = tpu_compile.stablehlo(
        draw.sample, ((rows, vocab), jnp.float32), *each, ((4, rows), jnp.int32)
    )
    assert "64>" not in text.replace("vector", ""), "nothing is wider than 32 bits"
    compile_for(chip, text)
