"""Writing keys and values on a TPU, which moves no less than a register's 8 rows.

The slots of a step are gathered into aligned groups of 8. For each the kernel reads the old rows, replaces those that
the step has tokens for, and writes the group back, in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octavo.kernels.pallas.layout import pack

GROUP = 8


def write_rows(
    cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: jax.Array,
    tokens: jax.Array,
    *,
    interpret: Any = False,
) -> jax.Array:
    """The cache [pages, words, page, width] with k [T, H, D] and v [T, H, Dv] in it.

    ids [N], tokens [N, GROUP]: what `tiles.write_groups` makes of the slots; pages are multiples of GROUP.
    """
    _, words, page, width = cache.shape
    rows = pack(k, v, width, cache.dtype)
    new = rows[jnp.maximum(tokens, 0)].transpose(0, 2, 1, 3)  # [N, words, GROUP, width]
    per_page = page // GROUP
    # One bit for each row of a group that changes.
    changed = ((tokens >= 0).astype(jnp.int32) << jnp.arange(GROUP, dtype=jnp.int32)).sum(1)
    group = pl.BlockSpec(
        (1, words, GROUP, width),
        lambda i, ids, _: (lax.div(ids[i], per_page), 0, lax.rem(ids[i], per_page), 0),
    )
    mine = pl.BlockSpec((1, words, GROUP, width), lambda i, *_: (i, 0, 0, 0))
    return pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(len(ids),), in_specs=[mine, group], out_specs=group
        ),
        input_output_aliases={3: 0},  # the cache, behind two scalars and the rows
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="octavo_write_kv",
    )(ids, changed, new, cache)


def _kernel(ids_ref: Any, changed_ref: Any, new_ref: Any, old_ref: Any, out_ref: Any) -> None:
    row = lax.broadcasted_iota(jnp.int32, new_ref.shape, 2)
    mine = lax.shift_right_logical(changed_ref[pl.program_id(0)], row) & 1
    out_ref[...] = jnp.where(mine == 1, new_ref[...], old_ref[...])
