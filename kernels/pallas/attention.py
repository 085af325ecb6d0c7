"""Paged attention of a whole step, prefill, decode or mixed: one Pallas kernel, and the same in plain XLA.

Both take queries cut into tiles of one sequence each (`tiles`), walk only over the pages a tile can see, and keep a
running maximum and sum (online softmax; Milakov and Gimelshein 2018). Minus infinity is a finite number: a row
that has seen nothing yet would otherwise become NaN.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octavo.kernels.pallas.layout import packed, unpack

NEVER = -1e30
LANES = 128
BUFFER_BYTES = 2 << 20
"""What one of the two buffers for keys and values may take."""

Body = Literal["pallas", "plain"]


def tile_size(q_heads: int, kind: Literal["decode", "mixed"]) -> int:
    """Queries of one sequence that are worked on together: about 1024 rows over all heads."""
    if kind == "decode":
        return 1
    size = 8
    while size < 64 and 2 * size * q_heads <= 1024:
        size *= 2
    return size


def paged_attention(
    q: jax.Array,
    cache: jax.Array,
    tables: jax.Array,
    work: jax.Array,
    rows: jax.Array,
    row_of: jax.Array,
    sinks: jax.Array | None = None,
    *,
    kv_heads: int,
    value_size: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    body: Body = "plain",
    interpret: Any = False,
) -> jax.Array:
    """q [T, Hq, D] over the pages of `cache` -> [T, Hq, value_size], causal.

    tables [S, blocks]; work [3, N]: `Tiles.seq`, `first` and `end`; rows [N, size]; row_of [T]; sinks [Hq] float32:
    an extra logit in the softmax's denominator. window > 0: a query sees its last `window` positions. softcap
    c > 0: scores become c·tanh(score/c).
    """
    _, q_heads, size = q.shape
    width = cache.shape[-1]
    count, tile = rows.shape
    group = q_heads // kv_heads
    # Rows of a tile: for each query head of a group, its queries. Whole registers: 8 rows of 32 bits, 16 of 16.
    multiple = 8 if q.dtype == jnp.float32 else 16
    padded_group = group
    while body == "pallas" and padded_group * tile % multiple:
        padded_group += 1
    tiled = q[rows].reshape(count, tile, kv_heads, group, size).transpose(0, 2, 3, 1, 4)
    pad_group = (0, padded_group - group)
    tiled = jnp.pad(tiled, ((0, 0), (0, 0), pad_group, (0, 0), (0, width - size)))
    tiled = tiled.reshape(count, kv_heads, padded_group * tile, width)
    if sinks is not None:
        per_row = jnp.pad(sinks.astype(jnp.float32).reshape(kv_heads, group), ((0, 0), pad_group))
        sinks = jnp.repeat(per_row, tile, axis=1)
    settings = {"tile": tile, "scale": scale, "window": window, "softcap": softcap}
    run = partial(_pallas, interpret=interpret) if body == "pallas" else _plain
    out = run(tiled, cache, tables, work, sinks, **settings)
    out = out.reshape(count, kv_heads, padded_group, tile, width)[:, :, :group]
    out = out.transpose(0, 3, 1, 2, 4).reshape(count * tile, q_heads, width)
    return out[row_of, :, :value_size]


def _scores(
    s: jax.Array, q_at: jax.Array, k_at: jax.Array, end: Any, window: int, softcap: float
) -> jax.Array:
    if softcap > 0:
        s = softcap * jnp.tanh(s * (1.0 / softcap))
    seen = (k_at <= q_at) & (k_at < end)
    if window > 0:
        seen &= k_at > q_at - window
    return jnp.where(seen, s, NEVER)


# --------------------------------------------------------------------------------------- plain XLA

CHUNK = 128
"""Positions that the plain body reads at a time."""


def _plain(
    q: jax.Array,
    cache: jax.Array,
    tables: jax.Array,
    work: jax.Array,
    sinks: jax.Array | None,
    *,
    tile: int,
    scale: float,
    window: int,
    softcap: float,
) -> jax.Array:
    count, kv_heads, rows, width = q.shape
    _, words, page, _ = cache.shape
    seq, first, end = work
    pages = max(1, CHUNK // page)
    chunk = pages * page
    mine = tables[seq]  # [N, blocks]
    mine = jnp.pad(mine, ((0, 0), (0, -mine.shape[1] % pages)))
    q_at = first[:, None] + jnp.arange(rows)[None, :] % tile  # [N, R]
    wide = q.astype(jnp.float32)

    def some(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = state
        ids = lax.dynamic_slice_in_dim(mine, j * pages, pages, axis=1)
        found = cache[ids].transpose(0, 2, 1, 3, 4).reshape(count, words, chunk, width)
        k, v = unpack(found) if packed(cache.dtype) else (found[:, 0::2], found[:, 1::2])
        k_at = j * chunk + jnp.arange(chunk)
        inside = k_at[None, :] < end[:, None]
        v = jnp.where(inside[:, None, :, None], v, 0.0)  # nothing there yet: NaN times zero is NaN
        s = jnp.einsum("nhrd,nhcd->nhrc", wide, k, precision=lax.Precision.HIGHEST) * scale
        s = _scores(
            s, q_at[:, None, :, None], k_at[None, None, None, :], end[:, None, None, None],
            window, softcap,
        )  # fmt: skip
        new_top = jnp.maximum(top, s.max(-1))
        p = jnp.exp(s - new_top[..., None])
        keep = jnp.exp(top - new_top)
        acc = acc * keep[..., None] + jnp.einsum(
            "nhrc,nhcd->nhrd", p, v, precision=lax.Precision.HIGHEST
        )
        return new_top, total * keep + p.sum(-1), acc

    if sinks is None:
        top, total = jnp.full((count, kv_heads, rows), NEVER), jnp.zeros((count, kv_heads, rows))
    else:
        top = jnp.broadcast_to(sinks[None], (count, kv_heads, rows))
        total = jnp.ones((count, kv_heads, rows))
    start = jnp.int32(0)
    if window > 0:
        lowest = jnp.where(end > 0, jnp.maximum(first - window + 1, 0), jnp.iinfo(jnp.int32).max)
        start = jnp.minimum(lowest.min(), end.max()) // chunk
    state = (top, total, jnp.zeros(q.shape, jnp.float32))
    stop = (end.max() + chunk - 1) // chunk
    _, total, acc = lax.fori_loop(start, stop, some, state)
    return (acc / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)


# ------------------------------------------------------------------------------------------ Pallas


def _pallas(
    q: jax.Array,
    cache: jax.Array,
    tables: jax.Array,
    work: jax.Array,
    sinks: jax.Array | None,
    *,
    tile: int,
    scale: float,
    window: int,
    softcap: float,
    interpret: Any,
) -> jax.Array:
    count, kv_heads, rows, width = q.shape
    _, words, page, _ = cache.shape
    blocks = tables.shape[1]
    pages = max(1, min(blocks, 256 // page, BUFFER_BYTES // (words * page * width * 4)))
    settings = {
        "tile": tile, "scale": scale, "window": window, "softcap": softcap,
        "blocks": blocks, "with_sinks": sinks is not None,
    }  # fmt: skip
    one_tile = pl.BlockSpec((1, kv_heads, rows, width), lambda i, *_: (i, 0, 0, 0))
    whole = pl.BlockSpec((kv_heads, rows, LANES), lambda i, *_: (0, 0, 0))
    in_specs = [
        one_tile,
        *([whole] if sinks is not None else []),
        pl.BlockSpec(memory_space=pl.ANY),
    ]
    operands = [q, *([] if sinks is None else [_over_lanes(sinks)]), cache]
    return pl.pallas_call(
        partial(_kernel, **settings),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(count,),
            in_specs=in_specs,
            out_specs=one_tile,
            scratch_shapes=[
                pltpu.VMEM((2, pages, words, page, width), cache.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, width), jnp.float32),
            ],
        ),
        # Tiles hand each other the buffer that the next one's first pages are on their way to.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="octavo_paged_attention",
    )(work.reshape(-1), tables.reshape(-1), *operands)


def _over_lanes(per_row: jax.Array) -> jax.Array:
    return jnp.broadcast_to(per_row[..., None], (*per_row.shape, LANES))


def _kernel(
    work_ref: Any,
    tables_ref: Any,
    q_ref: Any,
    *refs: Any,
    tile: int,
    scale: float,
    window: int,
    softcap: float,
    blocks: int,
    with_sinks: bool,
) -> None:
    """One tile: reads its sequence's pages in turn, `pages` at a time, while the next are on their way."""
    sinks_ref = refs[0] if with_sinks else None
    cache_ref, o_ref, buffer, arrived, turn, top_ref, total_ref, acc_ref = refs[with_sinks:]
    _, pages, _, page, _ = buffer.shape
    i, count = pl.program_id(0), pl.num_programs(0)
    chunk = pages * page

    def span(t: Any) -> tuple[Any, Any, Any]:
        """(first chunk, chunk after the last, position after the last) of tile t."""
        end = work_ref[2 * count + t]
        lowest = jnp.maximum(work_ref[count + t] - window + 1, 0) if window > 0 else 0
        # Numbers here are never negative, and a division that rounds down needs to know its chip.
        first = lax.div(lowest, chunk) if window > 0 else 0
        return first, pl.cdiv(end, chunk), end

    def fetch(t: Any, j: Any, place: Any, wait: bool) -> None:
        """Starts, or waits for, the copies of tile t's chunk j into buffer `place`."""
        used = pl.cdiv(work_ref[2 * count + t], page)
        row = work_ref[t] * blocks
        last = row + blocks - 1
        for p in range(pages):
            source = cache_ref.at[tables_ref[jnp.minimum(row + j * pages + p, last)]]
            copy = pltpu.make_async_copy(source, buffer.at[place, p], arrived.at[place])
            pl.when(j * pages + p < used)(copy.wait if wait else copy.start)

    begin, stop, end = span(i)

    def first_fetch() -> None:
        turn[0] = 0
        fetch(0, begin, 0, wait=False)

    def whole_tile() -> None:
        if sinks_ref is None:
            top_ref[...] = jnp.full_like(top_ref, NEVER)
            total_ref[...] = jnp.zeros_like(total_ref)
        else:
            top_ref[...] = sinks_ref[...]
            total_ref[...] = jnp.ones_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)
        first_turn = turn[0]
        following = jnp.minimum(i + 1, count - 1)
        next_begin, _, next_end = span(following)

        def step(j: Any, _: None) -> None:
            place = lax.rem(first_turn + j - begin, 2)
            pl.when(j + 1 < stop)(lambda: fetch(i, j + 1, 1 - place, wait=False))
            pl.when((j + 1 == stop) & (i + 1 < count) & (next_end > 0))(
                lambda: fetch(following, next_begin, 1 - place, wait=False)
            )
            fetch(i, j, place, wait=True)
            _attend(
                q_ref, buffer.at[place], top_ref, total_ref, acc_ref,
                first=work_ref[count + i], begin=j * chunk, end=end,
                tile=tile, scale=scale, window=window, softcap=softcap,
            )  # fmt: skip

        lax.fori_loop(begin, stop, step, None)
        turn[0] = lax.rem(first_turn + stop - begin, 2)
        o_ref[0] = (acc_ref[...] / total_ref[:, :, :1]).astype(o_ref.dtype)

    def no_work() -> None:
        o_ref[...] = jnp.zeros_like(o_ref)

    pl.when((i == 0) & (end > 0))(first_fetch)
    pl.when(end > 0)(whole_tile)
    pl.when(end == 0)(no_work)


def _attend(
    q_ref: Any,
    kv_ref: Any,
    top_ref: Any,
    total_ref: Any,
    acc_ref: Any,
    *,
    first: Any,
    begin: Any,
    end: Any,
    tile: int,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """Adds one chunk of keys and values, at positions from `begin` on, to every head's running softmax."""
    pages, _, page, width = kv_ref.shape
    _, kv_heads, rows, _ = q_ref.shape
    chunk = pages * page
    in_pairs = packed(kv_ref.dtype)
    exact = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else lax.Precision.DEFAULT
    # A tile is a power of two of queries, so that no vector has to be divided.
    q_at = first + (lax.broadcasted_iota(jnp.int32, (rows, chunk), 0) & (tile - 1))
    k_at = begin + lax.broadcasted_iota(jnp.int32, (rows, chunk), 1)
    inside = begin + lax.broadcasted_iota(jnp.int32, (chunk, width), 0) < end
    for h in range(kv_heads):
        if in_pairs:
            k, v = unpack(kv_ref[:, h].reshape(chunk, width))
        else:
            k = kv_ref[:, 2 * h].reshape(chunk, width)
            v = kv_ref[:, 2 * h + 1].reshape(chunk, width)
        v = jnp.where(inside, v, 0.0).astype(q_ref.dtype)  # not written yet: NaN times zero is NaN
        s = lax.dot_general(
            q_ref[0, h], k.astype(q_ref.dtype), (((1,), (1,)), ((), ())),
            precision=exact, preferred_element_type=jnp.float32,
        )  # fmt: skip
        s = _scores(s * scale, q_at, k_at, end, window, softcap)
        top = top_ref[h]  # [rows, LANES], the same in every lane
        new_top = jnp.maximum(top, s.max(axis=1, keepdims=True))
        p = jnp.exp(s - new_top[:, :1])
        keep = jnp.exp(top - new_top)
        total_ref[h] = total_ref[h] * keep + p.sum(axis=1, keepdims=True)
        top_ref[h] = new_top
        acc_ref[h] = acc_ref[h] * keep[:, :1] + lax.dot_general(
            p.astype(q_ref.dtype), v, (((1,), (0,)), ((), ())),
            precision=exact, preferred_element_type=jnp.float32,
        )  # fmt: skip
