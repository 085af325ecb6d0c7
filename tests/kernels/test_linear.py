"""Products with packed weights against float64, for every format, shape class and instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kernels import cpu
from octavo.kernels.cpu.weights import FORMATS

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODES = ("codes8", "codes4")
SHAPES = [(1, 33, 64), (2, 1, 32), (5, 96, 160), (13, 50, 96), (29, 130, 64), (120, 64, 1536)]


def weight(n: int, k: int, scale: float = 0.1) -> torch.Tensor:
    return torch.randn(n, k) * scale


def pack(original: torch.Tensor, format: str, gated: bool = False) -> cpu.PackedWeight:
    """Packed in a format; in one of codes, by the nearest ones."""
    n, k = original.shape
    packed = cpu.PackedWeight(n, k, format, gated=gated)
    return (
        packed.pack_codes(*coded(original, format)) if format in CODES else packed.pack([original])
    )


def coded(original: torch.Tensor, format: str) -> tuple[torch.Tensor, ...]:
    """Codes, scales and, of codes4, minima: something that is not finite makes its group's scale so."""
    groups = original.view(original.shape[0], -1, 32)
    odd = (groups * 0).sum(-1)
    if format == "codes8":
        scales = (groups.abs().amax(-1) / 127 + odd).half()
        codes = (groups / scales[..., None].float()).nan_to_num().round().clamp(-128, 127)
        return codes.flatten(1).to(torch.int8), scales
    low = groups.amin(-1).half()
    scales = ((groups.amax(-1) - low) / 15 + odd).half()
    steps = (groups - low[..., None].float()) / scales[..., None].float()
    return (
        steps.nan_to_num().round().clamp(0, 15).flatten(1).to(torch.uint8),
        scales,
        low + odd.half(),
    )


def unpacked(packed: cpu.PackedWeight) -> torch.Tensor:
    out = torch.empty(packed.n, packed.k)
    cpu.unpack_rows(out, packed, np.arange(packed.n))
    return out


def product(
    packed: cpu.PackedWeight, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.empty(x.shape[0], packed.n)
    cpu.linear(out, x, packed, bias)
    return out


def quantized_rows(x: torch.Tensor, format: str) -> torch.Tensor:
    """What integer formats see of x: 8-bit codes by row and group of inputs, in float64."""
    group = 64 if format == "int8" else 32
    whole = torch.nn.functional.pad(x, (0, -x.shape[1] % group)).view(x.shape[0], -1, group)
    top = whole.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    seen = torch.round(whole * (torch.full_like(top, 127) / top)).double() * (top / 127.0).double()
    return seen.flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_products(isa: str, format: str, gated: bool) -> None:
    for rows, n, k in SHAPES:
        n += n % 2 if gated else 0
        original = weight(n, k)
        packed = pack(original, format, gated)
        x, bias = torch.randn(rows, k), torch.randn(n)
        inner = quantized_rows(x, format) if format in ("int8", "int4") else x.double()
        want = inner @ unpacked(packed).double().T + bias.double()
        # Against the same quantised operands only float32 rounding is left; a code on the edge
        # between two neighbours may fall to either side.
        slack = 0.02 if format in ("int8", "int4") else 1e-4
        torch.testing.assert_close(product(packed, x, bias).double(), want, rtol=0, atol=slack)


@pytest.mark.parametrize("format", FLOATS)
def test_float_weights_are_stored_as_they_are(isa: str, format: str) -> None:
    original = weight(70, 96).to(FLOATS[format])
    for gated in (False, True):
        packed = cpu.PackedWeight(70, 96, format, gated=gated).pack([original[:32], original[32:]])
        assert torch.equal(unpacked(packed), original.float())


@pytest.mark.parametrize("source", FLOATS)
def test_int8_is_the_nearest_code_by_row(isa: str, source: str) -> None:
    original = weight(70, 100).to(FLOATS[source])
    packed = cpu.PackedWeight(70, 100, "int8").pack([original])
    scale = original.float().abs().amax(-1, keepdim=True) / 127
    error = (unpacked(packed) - original.float()).abs()
    assert bool((error <= scale * 0.5001).all())


def test_int4_keeps_what_is_on_a_grid(isa: str) -> None:
    """Weights that a 4-bit format with scale and minimum can hold come back exactly."""
    codes = torch.randint(0, 16, (40, 3, 32)).float()
    codes[..., 0], codes[..., 1] = 0, 15
    scale = torch.randint(1, 9, (40, 3, 1)).float() / 64
    low = -torch.randint(0, 64, (40, 3, 1)).float() / 32
    original = (codes * scale + low).flatten(1)
    packed = cpu.PackedWeight(40, 96, "int4").pack([original])
    torch.testing.assert_close(unpacked(packed), original, rtol=0, atol=1e-6)


def test_int4_error_is_at_most_that_of_the_plain_range(isa: str) -> None:
    original = weight(64, 256)
    packed = cpu.PackedWeight(64, 256, "int4").pack([original])
    groups = original.view(64, 8, 32)
    low, high = groups.amin(-1, keepdim=True).half().float(), groups.amax(-1, keepdim=True)
    step = ((high - groups.amin(-1, keepdim=True)) / 15).half().float()
    plain = (torch.round((groups - low) / step).clamp(0, 15) * step + low).flatten(1)
    ours = (unpacked(packed) - original).pow(2).sum()
    assert ours <= (plain - original).pow(2).sum() * 1.0001


@pytest.mark.parametrize("k", [64, 1536, 65536])
@pytest.mark.parametrize("sign", [1, -1])
def test_int8_extremes_are_exact(isa: str, k: int, sign: int) -> None:
    """Every code at its extreme: a saturating instruction, or an overflow, would show. Against int64;
    the sums of groups are multiples of 64 · 127² and stay exact in float32."""
    w = torch.full((35, k), 127.0) * sign
    x = torch.full((9, k), 127.0)
    x[1::2] *= -1
    w[3, ::2] *= -1
    packed = cpu.PackedWeight(35, k, "int8").pack([w])
    want = x.to(torch.int64) @ w.to(torch.int64).T
    assert torch.equal(product(packed, x).double(), want.float().double())


def test_random_codes_are_exact(isa: str) -> None:
    w = torch.randint(-127, 128, (50, 300)).float()
    x = torch.randint(-127, 128, (21, 300)).float()
    w[:, 0], x[:, ::64] = 127, -127  # the scales are then 1
    packed = cpu.PackedWeight(50, 300, "int8").pack([w])
    assert torch.equal(product(packed, x), (x.to(torch.int64) @ w.to(torch.int64).T).float())


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_its_company(isa: str, format: str) -> None:
    packed = pack(weight(200, 96), format, True)
    x = torch.randn(150, 96)
    together = product(packed, x)
    for count in (1, 2, 3, 5, 8, 13, 14, 15, 40, 113):
        assert torch.equal(product(packed, x[:count]), together[:count])
    cpu.set_threads(1)
    assert torch.equal(product(packed, x), together)
    cpu.set_threads()


@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize("gated", [False, True])
def test_products_of_codes_are_those_of_their_numbers(isa: str, format: str, gated: bool) -> None:
    """To the last bit, in every height of a tile."""
    codes, scales, *minima = coded(weight(70, 160), format)
    values = codes.float().view(70, 5, 32) * scales.float()[..., None]
    if minima:
        values = values + minima[0].float()[..., None]
    values = values.flatten(1)
    packed = cpu.PackedWeight(70, 160, format, gated=gated).pack_codes(codes, scales, *minima)
    assert torch.equal(unpacked(packed), values)
    plain = cpu.PackedWeight(70, 160, "float32", gated=gated).pack([values])
    x, bias = torch.randn(300, 160), torch.randn(70)
    for rows in (1, 2, 3, 5, 8, 12, 13, 14, 15, 27, 40, 113, 300):
        assert torch.equal(product(packed, x[:rows], bias), product(plain, x[:rows], bias))


@pytest.mark.parametrize("format", ["int8", "int4", *CODES])
def test_nonfinite_rows_stay_visible(isa: str, format: str) -> None:
    packed = pack(weight(40, 64), format)
    x = torch.randn(5, 64)
    clean = product(packed, x)
    x[1, 7], x[3, 0] = float("nan"), float("inf")
    out = product(packed, x)
    odd = out[[1, 3]]
    assert bool((~odd.isfinite() if format in CODES else odd.isnan()).all())
    assert torch.equal(out[[0, 2, 4]], clean[[0, 2, 4]])
    zeros = product(packed, torch.zeros(2, 64))
    assert torch.equal(zeros, torch.zeros(2, 40))
    tiny = product(packed, torch.full((1, 64), 1e-42))
    assert bool(tiny.isfinite().all())


@pytest.mark.parametrize("format", ["int8", "int4", *CODES])
def test_nonfinite_weights_stay_visible(isa: str, format: str) -> None:
    original = weight(40, 64)
    original[5, 6] = float("nan")
    original[6, 7] = float("inf")
    out = product(pack(original, format), torch.randn(3, 64))
    assert bool(out[:, 5:7].isnan().all()) and bool(out[:, :5].isfinite().all())


def test_sizes_that_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="groups of 32"):
        _ = cpu.PackedWeight(10, 48, "int4").nbytes
    with pytest.raises(ValueError, match="as int8"):
        _ = cpu.PackedWeight(10, 70000, "int8").nbytes
    with pytest.raises(ValueError, match="do not make"):
        cpu.PackedWeight(10, 64, "int8").pack([weight(9, 64)])
    for format in CODES:
        with pytest.raises(ValueError, match="groups of 32"):
            _ = cpu.PackedWeight(10, 48, format).nbytes
        with pytest.raises(ValueError, match="codes"):
            cpu.PackedWeight(10, 64, format).pack([weight(10, 64)])
    with pytest.raises(ValueError, match="multiple of 64"):
        cpu.PackedWeight(10, 64, "int8").place(torch.zeros(64, dtype=torch.uint8))


def test_strided_rows(isa: str) -> None:
    packed = cpu.PackedWeight(40, 64, "float32").pack([weight(40, 64)])
    wide = torch.randn(6, 200)
    assert torch.equal(
        product(packed, wide[:, 50:114]), product(packed, wide[:, 50:114].contiguous())
    )
