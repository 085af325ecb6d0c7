"""The portable bodies of int8 and int4 against float64, and the CPU's kernels against them."""

from __future__ import annotations

import pytest
import torch

from octavo.core.contract import Ops, WeightSpec
from octavo.core.quantization import FORMS, form
from octavo.core.quantization.base import QuantizedTensor, quantize_rows, rounded_rows
from octavo.kernels import cpu

NEEDS_KERNELS = pytest.mark.skipif(not cpu.available(), reason="the kernels are not compiled")
GROUPS = {"int8": 0, "int4": 32}
# Of the largest weight of what shares a scale: half a step; of int4, whose best range may leave an
# extreme outside, a whole one.
MOST = {"int8": 0.5 / 127, "int4": 1.05 / 15 * 2}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def weights(n: int = 70, k: int = 192) -> torch.Tensor:
    w = torch.randn(n, k) * 0.1
    w[3] = 0.0
    w[4, 64:96] = 0.25  # a group of one value
    w[5] *= 1e-20
    return w


@pytest.mark.parametrize("name", FORMS)
def test_dequantised_weights_are_within_a_step(name: str) -> None:
    w = weights()
    packed = form(name).quantize(w, GROUPS[name])
    group = packed.group
    assert packed.shape == (70, 192) and group == (GROUPS[name] or 192)
    back = form(name).dequantize(packed)
    most = w.view(70, -1, group).abs().amax(-1, keepdim=True)
    error = (back - w).view(70, -1, group).abs()
    assert bool((error <= most * MOST[name] + 1e-7).all())
    assert torch.equal(back[3], torch.zeros(192))
    ids = torch.tensor([69, 0, 69])
    assert torch.equal(form(name).dequantize(packed.rows(ids)), back[ids])


@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_the_codes(name: str) -> None:
    """Against float64 over the same codes; and how far quantising itself moves them."""
    w, x = weights(), torch.randn(9, 192)
    x[:, 7] *= 50  # an outlier column, as language models have
    packed = form(name).quantize(w, GROUPS[name])
    out = form(name).linear(x, packed)
    want = rounded_rows(x, form(name).shared(packed)) @ form(name).dequantize(packed).double().T
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    exact = x.double() @ w.double().T
    error = (out.double() - exact).norm() / exact.norm()
    assert 0 < error < {"int8": 0.025, "int4": 0.1}[name]
    half = form(name).linear(x.bfloat16(), packed)
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("name", FORMS)
def test_a_product_of_no_rows_has_none(name: str) -> None:
    """A step that finishes no prompt asks for the logits of no row."""
    packed = form(name).quantize(weights(), GROUPS[name])
    assert form(name).linear(torch.empty(0, 192), packed).shape == (0, 70)
    assert form(name).dequantize(packed.rows(torch.empty(0, dtype=torch.int64))).shape == (0, 192)


def test_activations_have_a_scale_by_group() -> None:
    x = torch.randn(4, 100)
    x[1, 70] = float("nan")
    x[2, 3] = float("inf")
    x[3, :64] = 1e-42  # too small for a scale
    codes, scales = quantize_rows(x, 64)
    assert codes.shape == (4, 2, 64) and scales.shape == (4, 2, 1)
    assert codes.abs().max() == 127 and bool((codes == codes.round()).all())
    assert bool(codes[0, 1, 36:].eq(0).all())  # padding
    nan = scales[..., 0].isnan()
    assert nan.tolist() == [[False, False], [False, True], [True, False], [False, False]]
    assert scales[3, 0] == 0
    seen = rounded_rows(x[:1], 64)
    step = x[:1].abs().max() / 127
    assert seen.shape == (1, 100) and (seen - x[:1]).abs().max() <= step * 0.51


@pytest.mark.parametrize("name", FORMS)
def test_nonfinite_numbers_stay_visible(name: str) -> None:
    w = weights()
    w[1, 5], w[2, 150] = float("nan"), float("inf")
    out = form(name).linear(torch.randn(2, 192), form(name).quantize(w, GROUPS[name]))
    assert bool(out[:, 1:3].isnan().all()) and bool(out[:, 3:].isfinite().all())
    x = torch.randn(3, 192)
    x[1, 9] = float("inf")
    out = form(name).linear(x, form(name).quantize(weights(), GROUPS[name]))
    assert bool(out[1, :3].isnan().all()) and bool(out[[0, 2]].isfinite().all())


def test_int4_keeps_what_is_on_a_grid() -> None:
    codes = torch.randint(0, 16, (40, 3, 32)).float()
    codes[..., 0], codes[..., 1] = 0, 15
    scale = torch.randint(1, 9, (40, 3, 1)).float() / 64
    low = -torch.randint(0, 64, (40, 3, 1)).float() / 32
    packed = form("int4").quantize((codes * scale + low).flatten(1), 32)
    assert torch.equal(packed.codes, codes.flatten(1).to(torch.uint8))
    assert torch.equal(form("int4").dequantize(packed), (codes * scale + low).flatten(1))


def test_int4_is_no_worse_than_the_plain_range() -> None:
    w = torch.randn(64, 256)
    ours = form("int4").dequantize(form("int4").quantize(w, 32))
    groups = w.view(64, 8, 32)
    low = groups.amin(-1, keepdim=True).half().float()
    step = ((groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15).half().float()
    plain = (torch.round((groups - low) / step).clamp(0, 15) * step + low).flatten(1)
    assert (ours - w).square().sum() < (plain - w).square().sum()


@pytest.mark.parametrize("name", FORMS)
def test_sizes(name: str) -> None:
    kind = form(name)
    assert kind.holds((7, 96), GROUPS[name])
    assert kind.nbytes((10, 64), GROUPS[name]) == {"int8": 640 + 40, "int4": 320 + 80}[name]
    packed = kind.quantize(torch.randn(10, 64), GROUPS[name])
    stored = packed.codes.numel() * kind.bits // 8 + packed.scales.nbytes
    stored += 0 if packed.minima is None else packed.minima.nbytes
    assert stored == kind.nbytes((10, 64), GROUPS[name])


def test_shapes_that_a_form_cannot_hold() -> None:
    assert not form("int4").holds((7, 48), 32)
    assert not form("int4").holds((7,), 32)
    assert not form("int8").holds((7, 65537), 0)
    assert not form("int8").holds((7, 64), 32)  # a scale for each output, no other


@NEEDS_KERNELS
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("n", "k"), [(70, 192), (130, 64), (33, 160)])
def test_kernels_choose_the_same_codes(isa: str, name: str, n: int, k: int) -> None:
    w = weights(n, k)
    portable = form(name).dequantize(form(name).quantize(w, GROUPS[name]))
    packed = cpu.PackedWeight(n, k, name).pack([w])
    out = torch.empty(n, k)
    cpu.unpack_rows(out, packed, torch.arange(n).numpy())
    # A tie, or two ranges with equal error, may fall to either side: no step is ever moved.
    differs = (out - portable).abs() > 1e-6
    assert differs.float().mean() < 0.002
    step = w.view(n, -1, GROUPS[name] or k).abs().amax(-1, keepdim=True) * MOST[name] * 2
    assert bool(((out - portable).abs().view(n, -1, GROUPS[name] or k) <= step * 1.01 + 1e-7).all())


@NEEDS_KERNELS
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_kernels_take_given_codes_as_they_are(isa: str, name: str, gated: bool) -> None:
    """Packed from codes, a weight gives back their values, and products those of the portable body."""
    packed = form(name).quantize(weights(), GROUPS[name])
    kernel = cpu.PackedWeight(70, 192, name, gated=gated)
    kernel.pack_codes(packed.codes, packed.scales, packed.minima)
    out = torch.empty(70, 192)
    cpu.unpack_rows(out, kernel, torch.arange(70).numpy())
    assert torch.equal(out, form(name).dequantize(packed))
    x, product = torch.randn(9, 192), torch.empty(9, 70)
    x[:, 7] *= 50
    cpu.linear(product, x, kernel)
    torch.testing.assert_close(product, form(name).linear(x, packed), rtol=1e-4, atol=2e-4)


@NEEDS_KERNELS
def test_codes_of_another_kind_are_refused() -> None:
    packed = form("int8").quantize(weights(), 0)
    with pytest.raises(ValueError, match="int4 codes"):
        cpu.PackedWeight(70, 192, "int4").pack_codes(packed.codes, packed.scales)
    with pytest.raises(ValueError, match="71 x 192"):
        cpu.PackedWeight(71, 192, "int8").pack_codes(packed.codes, packed.scales)


@pytest.mark.parametrize("name", FORMS)
def test_the_portable_ops_take_floats_and_codes_alike(name: str) -> None:
    w = weights()
    parts = {"a": w[:30], "b": w[30:]}
    spec = WeightSpec(
        "a+b", "linear", (("a", (30, 192)), ("b", (40, 192))), scheme=name, group=GROUPS[name]
    )
    ops = Ops()
    from_floats = ops.pack_weight(parts, spec, "float32")
    codes = {n: form(name).quantize(p, GROUPS[name]) for n, p in parts.items()}
    from_codes = ops.pack_weight(codes, spec, "bfloat16")
    assert isinstance(from_floats, QuantizedTensor) and from_codes.dtype == torch.bfloat16
    assert torch.equal(from_floats.codes, from_codes.codes)
    x, bias = torch.randn(3, 192), torch.randn(70)
    out = ops.linear(x, from_floats, bias=bias)
    assert torch.equal(out, form(name).linear(x, from_floats) + bias)
    ids = torch.tensor([4, 69])
    rows = ops.embedding(ids, from_codes)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, form(name).dequantize(from_codes)[ids].bfloat16())
    assert ops.weight_bytes(spec, "float32") == form(name).nbytes((70, 192), GROUPS[name])
