"""The Pallas kernels compiled for every TPU that libtpu describes, without one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
import tpu_compile

from octavo.kernels.pallas import attention, tiles, write

PAGES, BLOCKS, TOKENS, SEQS = 8000, 16, 256, 64
# heads, width of the cache, dtype, page, window, softcap, sinks: of models, and the corners.
MODELS: dict[str, tuple[tuple[int, int], int, Any, int, int, float, bool]] = {
    "llama 8B": ((32, 8), 128, jnp.bfloat16, 128, 0, 0.0, False),
    "one head a group": ((32, 32), 128, jnp.bfloat16, 16, 0, 0.0, False),
    "three in a group": ((9, 3), 128, jnp.bfloat16, 32, 0, 0.0, False),
    "wide, capped, window": ((8, 4), 256, jnp.bfloat16, 64, 1024, 50.0, False),
    "sinks, window": ((64, 8), 128, jnp.bfloat16, 16, 128, 0.0, True),
    "float32": ((8, 2), 128, jnp.float32, 8, 0, 0.0, False),
}


def cache_of(kv_heads: int, width: int, dtype: Any, page: int) -> tuple[tuple[int, ...], Any]:
    if dtype == jnp.bfloat16:
        return (PAGES, kv_heads, page, width), jnp.int32
    return (PAGES, 2 * kv_heads, page, width), jnp.float32


@pytest.mark.parametrize("chip", tpu_compile.CHIPS)
@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_attention(model: str, kind: Any, chip: str, compile_for: Any) -> None:
    (q_heads, kv_heads), width, dtype, page, window, softcap, sinks = MODELS[model]
    tokens = SEQS if kind == "decode" else TOKENS
    size = attention.tile_size(q_heads, kind)
    count = tiles.tile_count(tokens, SEQS, size)
    args: list[tuple[tuple[int, ...], Any]] = [
        ((tokens, q_heads, width), dtype),
        cache_of(kv_heads, width, dtype, page),
        ((SEQS, BLOCKS), jnp.int32),
        ((3, count), jnp.int32),
        ((count, size), jnp.int32),
        ((tokens,), jnp.int32),
    ]
    if sinks:
        args.append(((q_heads,), jnp.float32))
    fn = partial(
        attention.paged_attention, kv_heads=kv_heads, value_size=width, scale=0.1,
        window=window, softcap=softcap, body="pallas",
    )  # fmt: skip
    made = compile_for(chip, tpu_compile.stablehlo(fn, *args))
    assert made.kernels == 1
    cache = args[1][0]
    # The queries in tiles, and what comes out of them; never a copy of the cache.
    assert made.temporary < cache[0] * cache[1] * cache[2] * cache[3] * 4 // 2


@pytest.mark.parametrize("chip", tpu_compile.CHIPS)
@pytest.mark.parametrize("model", ["llama 8B", "three in a group", "float32"])
def test_writing_is_in_place(model: str, chip: str, compile_for: Any) -> None:
    (_, kv_heads), width, dtype, page, *_ = MODELS[model]
    shape, kept_as = cache_of(kv_heads, width, dtype, page)
    count = tiles.group_count(TOKENS, SEQS, write.GROUP)
    rows = ((TOKENS, kv_heads, width), dtype)
    text = tpu_compile.stablehlo(
        write.write_rows, (shape, kept_as), rows, rows,
        ((count,), jnp.int32), ((count, write.GROUP), jnp.int32), donate=0,
    )  # fmt: skip
    made = compile_for(chip, text)
    size = shape[0] * shape[1] * shape[2] * shape[3] * 4
    assert made.kernels == 1
    assert made.aliased == size, "the cache comes out where it went in"
    assert made.temporary < size // 4
