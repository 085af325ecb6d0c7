"""Every operation on the stand-in device against the portable one in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vendor_ops import (
    LIMITS,
    attends,
    computes_the_rest_of_a_layer,
    draws_as_the_portable_op,
    writes_the_named_slots_alone,
)
from wide_blocks import CONTINUED, DECODES, MIXED, STARTS

from octavo.backends.gaudi.backend import GaudiBackend
from octavo.plugins import WeightSpec


@pytest.mark.parametrize("chip", ["Gaudi3", "Gaudi2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kinds", "pad"), [(MIXED, 0), (MIXED, 3), (DECODES, 0), (DECODES, 4), (STARTS, 2), (CONTINUED, 0)]
)  # fmt: skip
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(0, 0.0, False), (7, 0.0, False), (150, 0.0, False), (0, 5.0, True)],
)
@pytest.mark.parametrize(("q_heads", "kv_heads", "size"), [(6, 2, 32), (4, 4, 24)])
def test_cache_and_attention(
    standin: Any,
    chip: str,
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
    standin.generation[0] = chip
    heads = (q_heads, kv_heads, size)
    how = {"window": window, "softcap": softcap, "sinks": sinks}
    attends(GaudiBackend(), "hpu", dtype, kinds, pad, heads, **how)  # type: ignore[arg-type]
    decodes, fused = any(q == 1 for _, q in kinds), chip == "Gaudi3" and not sinks
    assert (standin.calls["block_softmax"] > 0) == (decodes and fused)
    assert (standin.calls["block_softmax_adjustment"] > 0) == (decodes and fused)
    assert (standin.calls["sdpa_recomp_fwd"] > 0) == (any(q > 1 for _, q in kinds) and not sinks)


def test_nothing_but_the_named_slots_is_written(standin: Any) -> None:
    writes_the_named_slots_alone(GaudiBackend(), "hpu", clears=True)


def test_the_rest_of_a_layer(standin: Any) -> None:
    computes_the_rest_of_a_layer(GaudiBackend(), "hpu")
    assert standin.calls["rms_norm"] == 4 and standin.calls["rotary_pos_embedding"] == 8


@pytest.mark.parametrize("greedy", [False, True])
def test_draws_are_the_portable_ones(standin: Any, greedy: bool) -> None:
    draws_as_the_portable_op(GaudiBackend(), "hpu", greedy)


@pytest.mark.parametrize("bias", [False, True])
def test_fp8_products(standin: Any, bias: bool) -> None:
    """No worse than rounding weights and activations to three bits of fraction."""
    torch.manual_seed(6)
    backend = GaudiBackend()
    backend.start("hpu", LIMITS)
    ops = backend.ops("hpu")
    parts = {"q": torch.randn(40, 96), "k": torch.randn(24, 96) * 30}
    spec = WeightSpec("qk", "linear", (("q", (40, 96)), ("k", (24, 96))), scheme="fp8")
    x, b = torch.randn(7, 96).bfloat16(), torch.randn(64).bfloat16() if bias else None
    with torch.inference_mode():
        packed = ops.pack_weight(parts, spec, "bfloat16")
        got = ops.linear(x.to("hpu"), packed, bias=None if b is None else b.to("hpu")).cpu()
    stacked = torch.cat(list(parts.values())).double()
    wanted = torch.nn.functional.linear(x.double(), stacked, None if b is None else b.double())
    noise = x.double().norm(dim=1, keepdim=True) * stacked.norm(dim=1) * 2**-4
    assert ((got.double() - wanted).abs() < noise).all()
    assert standin.calls["fp8_gemm_v2"] == 1
