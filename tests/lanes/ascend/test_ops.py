"""Every operation, through torch-npu's schemas, against the portable one in float64."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import StandInAscend
from vendor_ops import (
    attends,
    computes_the_rest_of_a_layer,
    draws_as_the_portable_op,
    writes_the_named_slots_alone,
)
from wide_blocks import CONTINUED, DECODES, MIXED, STARTS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kinds", "pad"), [(MIXED, 0), (MIXED, 3), (DECODES, 0), (DECODES, 4), (STARTS, 2), (CONTINUED, 0)]
)  # fmt: skip
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(0, 0.0, False), (7, 0.0, False), (150, 0.0, True), (0, 0.0, True), (0, 5.0, True)],
)
@pytest.mark.parametrize(("q_heads", "kv_heads", "size"), [(6, 2, 32), (4, 4, 16)])
def test_cache_and_attention(
    npu: Any,
    dtype: str,
    kinds: tuple[tuple[int, int], ...],
    pad: int,
    window: int,
    softcap: float,
    sinks: bool,
    q_heads: int,
    kv_heads: int,
    size: int,
) -> None:
    heads = (q_heads, kv_heads, size)
    how = {"window": window, "softcap": softcap, "sinks": sinks}
    attends(StandInAscend(), "npu", dtype, kinds, pad, heads, **how)  # type: ignore[arg-type]
    assert npu["_npu_reshape_and_cache"] == 2
    decode = all(q == 1 for _, q in kinds)
    plain = decode and not window and not sinks
    assert npu["_npu_paged_attention"] == plain
    assert npu["npu_fused_infer_attention_score"] == (not plain and not sinks)
    assert npu["npu_fused_infer_attention_score_v2"] == (sinks and not softcap)


def test_nothing_but_the_named_slots_is_written(npu: Any) -> None:
    writes_the_named_slots_alone(StandInAscend(), "npu", clears=False)


def test_the_rest_of_a_layer(npu: Any) -> None:
    computes_the_rest_of_a_layer(StandInAscend(), "npu")
    assert npu["npu_rms_norm"] == npu["npu_add_rms_norm"] == 2
    assert npu["npu_rotary_mul"] == 8 and npu["npu_swiglu"] == 1


@pytest.mark.parametrize("greedy", [False, True])
def test_draws_are_the_portable_ones(npu: Any, greedy: bool) -> None:
    draws_as_the_portable_op(StandInAscend(), "npu", greedy)
