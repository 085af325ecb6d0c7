"""How the KV cache of one layer lies in memory, and how rows go into it.

A cache is [pages, words, page, width]. Heads come before positions, so the keys of one head on one page are a
matrix that the matrix unit takes as it lies. Numbers of 16 bits are kept in pairs, a key below its value in one
32-bit word (int32, `words` = KV heads): a token's row is then a row of whole words, which a chip whose registers
hold pairs of rows can write alone. float32 takes two words (float32, `words` = 2·KV heads: key, value, key, …).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

HIGH = -65536  # 0xFFFF0000 as an int32


def packed(cache_dtype: jnp.dtype) -> bool:
    """Whether a cache of this dtype holds bfloat16 pairs."""
    return bool(cache_dtype == jnp.int32)


def pack(k: jax.Array, v: jax.Array, width: int, cache_dtype: jnp.dtype) -> jax.Array:
    """k [T, H, D] and v [T, H, Dv] -> rows [T, words, width] of the cache, zero beyond D and Dv."""
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in (k, v))
    if not packed(cache_dtype):
        rows = jnp.stack((k, v), axis=2).astype(jnp.float32)
        return rows.reshape(k.shape[0], 2 * k.shape[1], width)
    low, high = (
        lax.bitcast_convert_type(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32)
        for x in (k, v)
    )
    return lax.shift_right_logical(low, jnp.int32(16)) | high


def unpack(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Words [...] of int32 -> their keys and values in float32, exactly."""
    key = lax.bitcast_convert_type(lax.shift_left(words, jnp.int32(16)), jnp.float32)
    value = lax.bitcast_convert_type(words & jnp.int32(HIGH), jnp.float32)
    return key, value


def scatter(cache: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    """The cache with k [T, H, D] and v [T, H, Dv] at `slots` [T]; a slot of -1 is skipped."""
    pages, _, page, width = cache.shape
    rows = pack(k, v, width, cache.dtype)
    # Beyond the last page a scatter drops a row; a negative index would count from the end.
    where = jnp.where(slots < 0, pages, slots // page)
    return cache.at[where, :, slots % page].set(rows, mode="drop")


def copy_pages(
    cache: jax.Array, source: jax.Array, target: jax.Array, count: jax.Array
) -> jax.Array:
    """The cache after copying page source[i] to target[i] for i < count [1], one after another."""

    def one(i: jax.Array, cache: jax.Array) -> jax.Array:
        page = lax.dynamic_index_in_dim(cache, source[i], keepdims=True)
        return lax.dynamic_update_slice_in_dim(cache, page, target[i], axis=0)

    return lax.fori_loop(0, count[0], one, cache)


def take_pages(cache: jax.Array, ids: jax.Array) -> jax.Array:
    """Pages `ids` [N] as [N, words, page, width]."""
    return jnp.take(cache, ids, axis=0, mode="clip")


def put_pages(cache: jax.Array, pages: jax.Array, ids: jax.Array) -> jax.Array:
    """The cache with `pages` [N, words, page, width] at `ids` [N]; an id beyond the last is skipped."""
    return cache.at[ids].set(pages, mode="drop")
