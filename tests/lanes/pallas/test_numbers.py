"""The Pallas kernels, interpreted on a CPU, and their twins in plain XLA, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from octavo.kernels.pallas import attention, layout, tiles, write

PAGES = 48
CHECKED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


@dataclass
class Step:
    """Sequences [(context, queries)] with their keys and values, in a cache that holds NaN elsewhere."""

    sequences: list[tuple[int, int]]
    q: Any
    k: list[Any]
    v: list[Any]
    dtype: Any
    page: int
    width: int = 128

    @property
    def table(self) -> Any:
        order = np.random.default_rng(5).permutation(np.arange(1, PAGES)).tolist()
        table = np.zeros((len(self.sequences) + 2, 12), np.int32)
        for s, (context, _) in enumerate(self.sequences):
            for i in range(-(-context // self.page)):
                table[s, i] = order.pop()
        return table

    def rows(self, new: bool) -> tuple[Any, Any, Any]:
        """(k, v, slots) of the step's own tokens, or of those before it; then five tokens of padding."""
        table, ks, vs, slots = self.table, [], [], []
        for s, (context, queries) in enumerate(self.sequences):
            at = np.arange(context - queries, context) if new else np.arange(context - queries)
            ks.append(self.k[s][at])
            vs.append(self.v[s][at])
            slots.append(table[s, at // self.page] * self.page + at % self.page)
        pad = ((0, 5), (0, 0), (0, 0))
        return (
            jnp.asarray(np.pad(np.concatenate(ks), pad), self.dtype),
            jnp.asarray(np.pad(np.concatenate(vs), pad), self.dtype),
            np.pad(np.concatenate(slots), (0, 5), constant_values=-1).astype(np.int32),
        )

    def empty(self) -> Any:
        heads = self.k[0].shape[1]
        if self.dtype == jnp.bfloat16:
            return jnp.full((PAGES, heads, self.page, self.width), -1, jnp.int32)  # two NaN each
        return jnp.full((PAGES, 2 * heads, self.page, self.width), jnp.nan, jnp.float32)

    def cache(self) -> Any:
        cache = self.empty()
        for new in (False, True):
            k, v, slots = self.rows(new)
            cache = layout.scatter(cache, k, v, jnp.asarray(slots))
        return cache


def make(
    sequences: list[tuple[int, int]],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    dtype: Any,
    page: int,
) -> Step:
    dice = np.random.default_rng(7)

    def draw(*shape: int) -> Any:
        return np.asarray(jnp.asarray(dice.standard_normal(shape), dtype), np.float64)

    tokens = sum(n for _, n in sequences) + 6  # of padding
    return Step(
        sequences,
        draw(tokens, heads[0], sizes[0]),
        [draw(c, heads[1], sizes[0]) for c, _ in sequences],
        [draw(c, heads[1], sizes[1]) for c, _ in sequences],
        dtype,
        page,
    )  # fmt: skip


def exact(step: Step, scale: float, window: int, softcap: float, sinks: Any) -> Any:
    found, at = [], 0
    for s, (context, queries) in enumerate(step.sequences):
        q = step.q[at : at + queries]
        at += queries
        k, v = (np.repeat(x[s], q.shape[1] // x[s].shape[1], axis=1) for x in (step.k, step.v))
        scores = np.einsum("qhd,khd->hqk", q, k) * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        q_at, k_at = np.arange(context - queries, context)[:, None], np.arange(context)[None]
        hidden = k_at > q_at
        if window:
            hidden |= k_at <= q_at - window
        scores = np.where(hidden, -np.inf, scores)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[:, None, None] - top)
        found.append(np.einsum("hqk,khd->qhd", weights / total, v))
    return np.concatenate(found)


def attended(step: Step, kind: str, body: str, sinks: Any, **settings: Any) -> Any:
    contexts = np.array([c for c, _ in step.sequences] + [0, 0], np.int32)
    counts = [n for _, n in step.sequences] + [0, 0]
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    heads = step.q.shape[1]
    cut = tiles.cut(start, contexts, len(step.q), attention.tile_size(heads, kind))  # type: ignore[arg-type]
    arrays = [step.q.astype(np.float32), step.table, np.stack((cut.seq, cut.first, cut.end))]
    q, table, work = (jnp.asarray(a) for a in arrays)
    fn = partial(
        attention.paged_attention,
        kv_heads=step.k[0].shape[1],
        value_size=step.v[0].shape[2],
        body=body,
        interpret=CHECKED if body == "pallas" else False,
        **settings,
    )
    more = [] if sinks is None else [jnp.asarray(sinks, jnp.float32)]
    rows, row_of = jnp.asarray(cut.rows), jnp.asarray(cut.row_of)
    out = jax.jit(fn)(q.astype(step.dtype), step.cache(), table, work, rows, row_of, *more)
    assert bool(jnp.isfinite(out).all()), "padding must stay finite, too"
    return np.asarray(out, np.float64)[: start[-1]]


CASES = [
    # heads, (K size, V size), dtype, page, window, softcap, sinks
    ((8, 2), (64, 64), jnp.float32, 16, 0, 0.0, False),
    ((8, 2), (128, 128), jnp.bfloat16, 32, 0, 0.0, False),
    ((6, 2), (80, 64), jnp.float32, 32, 7, 5.0, True),
    ((3, 3), (64, 64), jnp.bfloat16, 64, 20, 0.0, True),
    ((5, 1), (128, 128), jnp.float32, 16, 0, 30.0, False),
    ((4, 1), (128, 128), jnp.bfloat16, 8, 3, 0.0, False),
]


@pytest.mark.parametrize("body", ["pallas", "plain"])
@pytest.mark.parametrize(
    ("kind", "sequences"),
    [
        ("mixed", [(37, 1), (50, 19), (9, 9), (90, 40), (1, 1)]),
        ("decode", [(37, 1), (64, 1), (90, 1), (1, 1)]),
    ],
)
@pytest.mark.parametrize(("heads", "sizes", "dtype", "page", "window", "softcap", "sink"), CASES)
def test_attention(
    heads: tuple[int, int],
    sizes: tuple[int, int],
    dtype: Any,
    page: int,
    window: int,
    softcap: float,
    sink: bool,
    kind: str,
    sequences: list[tuple[int, int]],
    body: str,
) -> None:
    step = make(sequences, heads, sizes, dtype, page)
    sinks = np.random.default_rng(1).standard_normal(heads[0]) if sink else None
    settings = {"scale": sizes[0] ** -0.5, "window": window, "softcap": softcap}
    got = attended(step, kind, body, sinks, **settings)
    wanted = exact(step, sinks=sinks, **settings)
    # bfloat16: weights are rounded to 8 bits before they meet the values, and so is what comes out.
    close = {"rtol": 2e-5, "atol": 3e-6} if dtype == jnp.float32 else {"rtol": 1e-2, "atol": 2e-2}
    np.testing.assert_allclose(got, wanted, **close)


def races() -> bool:
    from jax._src.pallas.mosaic import interpret

    return bool(interpret.races.races_found)


def test_copies_do_not_race() -> None:
    """Fetches into one buffer while the other is read, over many tiles and chunks."""
    step = make([(90, 40), (70, 30), (80, 1)], (4, 2), (64, 64), jnp.float32, 8)
    settings = {"scale": 0.125, "window": 0, "softcap": 0.0}
    attended(step, "mixed", "pallas", None, **settings)
    assert not races()


def test_a_step_of_padding_alone() -> None:
    """What a warm-up runs."""
    step = make([(20, 1)], (4, 2), (64, 64), jnp.float32, 8)
    cut = tiles.cut(np.zeros(4, np.int32), np.zeros(3, np.int32), 8, 8)
    work = jnp.asarray(np.stack((cut.seq, cut.first, cut.end)))
    for body, interpret in (("pallas", CHECKED), ("plain", False)):
        out = attention.paged_attention(
            jnp.ones((8, 4, 64)), step.cache(), jnp.zeros((3, 12), jnp.int32), work,
            jnp.asarray(cut.rows), jnp.asarray(cut.row_of),
            kv_heads=2, value_size=64, scale=1.0, window=3, body=body, interpret=interpret,
        )  # fmt: skip
        assert bool((out == 0).all())


@pytest.mark.parametrize(
    ("dtype", "page"), [(jnp.float32, 16), (jnp.bfloat16, 8), (jnp.bfloat16, 64)]
)
def test_writing_touches_the_named_slots_only(dtype: Any, page: int) -> None:
    step = make([(37, 5), (50, 19), (9, 9), (64, 1), (65, 1)], (4, 2), (64, 48), dtype, page)
    cache = before = step.empty()
    for new in (False, True):
        k, v, slots = step.rows(new)
        ids, tokens = tiles.write_groups(slots, len(step.table), write.GROUP)
        wanted = layout.scatter(cache, k, v, jnp.asarray(slots))
        cache = write.write_rows(
            cache, k, v, jnp.asarray(ids), jnp.asarray(tokens), interpret=CHECKED
        )
        bits = [np.asarray(c).view(np.int32) for c in (cache, wanted)]
        np.testing.assert_array_equal(*bits)
    assert not races()
    touched = (np.asarray(cache).view(np.int32) != np.asarray(before).view(np.int32)).any((1, 3))
    every = np.concatenate([step.rows(new)[2] for new in (False, True)])
    assert set(np.flatnonzero(touched.reshape(-1)).tolist()) == set(every[every >= 0].tolist())
    first = layout.unpack(cache) if dtype == jnp.bfloat16 else (cache[:, 0::2], cache[:, 1::2])
    slot = int(step.rows(True)[2][0])
    for got, of in zip(first, (step.k, step.v), strict=True):
        row = np.asarray(got)[slot // page, :, slot % page, : of[0].shape[2]]
        np.testing.assert_array_equal(row, of[0][37 - 5])
