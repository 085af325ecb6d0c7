"""RMS norms in Triton's interpreter against float64, and the codes of 8 bits they may end in."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from octavo.core.quantization.base import quantize_rows
from octavo.kernels.triton import rms_norm
from octavo.kernels.triton.numbers import CODES, codes_dtype, encode, raw_codes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Half a unit in the last place of the result, and what float32 arithmetic adds; bfloat16 a whole one, as
# the interpreter rounds it towards zero and chips to nearest.
CLOSE = {torch.float32: 2e-6, torch.float16: 2**-11 * 1.01, torch.bfloat16: 2**-7 * 1.01}
LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e4m3fnuz": 240.0}


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    wide = x.double()
    factor = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return wide * factor * (offset + weight.double())


def strided(rows: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """A [rows, n] view into a wider matrix."""
    return torch.randn(rows, n + 5).to(dtype)[:, 3 : 3 + n]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "n", "offset"),
    [(1, 1, 0.0), (3, 7, 1.0), (40, 64, 0.0), (5, 1001, 1.0), (2, 4096, 0.0), (2, 16390, 1.0)],
)
def test_norms(dtype: torch.dtype, rows: int, n: int, offset: float) -> None:
    torch.manual_seed(n)
    x, weight = strided(rows, n, dtype), torch.randn(n).to(dtype)
    room = torch.full((rows + 1, n), 7.0, dtype=dtype)
    out = rms_norm.rms_norm(x, weight, 1e-5, offset=offset, out=room[:rows])
    want = normed(x, weight, 1e-5, offset)
    torch.testing.assert_close(out.double(), want, rtol=CLOSE[dtype], atol=3e-7)
    assert (room[rows] == 7).all()
    alone = rms_norm.rms_norm(x[-1:], weight, 1e-5, offset=offset)
    assert torch.equal(alone[0], out[-1])

    residual = torch.randn(rows, n).to(dtype)
    total = residual.double() + x.double()
    out, kept = rms_norm.add_rms_norm(x, residual, weight, 1e-5, offset=offset)
    assert kept.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(kept.double(), total, rtol=CLOSE[dtype], atol=1e-7)
    want = normed(kept, weight, 1e-5, offset)
    torch.testing.assert_close(out.double(), want, rtol=CLOSE[dtype], atol=3e-7)


def test_norm_of_heads_in_place() -> None:
    fused = torch.randn(9, 3 * 4 * 48)
    before = fused.clone()
    heads, weight = fused[:, 192:384].view(9, 4, 48), torch.randn(48)
    want = normed(heads, weight, 1e-6, 0.0)
    rms_norm.rms_norm(heads, weight, 1e-6, out=heads)
    torch.testing.assert_close(heads.double(), want, rtol=2e-6, atol=3e-7)
    assert torch.equal(fused[:, :192], before[:, :192])
    assert torch.equal(fused[:, 384:], before[:, 384:])


def test_nothing_to_do() -> None:
    assert rms_norm.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize(("rows", "n"), [(5, 100), (2, 16400)])
def test_codes_of_norms(kind: str, rows: int, n: int) -> None:
    torch.manual_seed(n)
    x, weight, residual = torch.randn(rows, n), torch.randn(n), torch.randn(rows, n)
    total = residual + x
    plain = rms_norm.rms_norm(total, weight, 1e-5)
    codes, scales = rms_norm.rms_norm_codes(x, weight, 1e-5, kind, residual=residual)
    assert torch.equal(residual, total)
    assert codes.dtype == codes_dtype(kind)
    most = plain.abs().amax(-1)
    torch.testing.assert_close(scales, most / LARGEST[kind])
    back = codes.float() * scales[:, None]
    if kind == "int8":
        wanted, own = quantize_rows(plain, n)
        assert (codes.float() - wanted[:, 0]).abs().max() <= 1  # a float32 ulp may tip a tie
        torch.testing.assert_close(scales, own[:, 0, 0])
        assert (back - plain).abs().max() <= 0.501 * scales.max()
    else:
        # Three bits of mantissa; below the smallest normal code a fixed step.
        step = scales[:, None] * 2.0 ** (-9 if kind == "fp8_e4m3" else -10)
        assert ((back - plain).abs() <= plain.abs() * 2**-4 * 1.001 + step / 2).all()


@pytest.mark.parametrize("kind", CODES)
def test_codes_of_odd_rows(kind: str) -> None:
    x = torch.randn(5, 40)
    x[0] = 0.0
    x[1, 7] = float("nan")
    x[2, 9] = float("inf")
    x[3] *= 1e-44  # too small for a scale
    codes, scales = rms_norm.rms_norm_codes(x, torch.full((40,), 1e-6), 1.0, kind)
    assert scales[1:3].isnan().all() and (codes.float()[:4] == 0).all()
    assert scales[0] == 0 and scales[3] == 0
    assert scales[4] > 0 and codes.float()[4].abs().max() == LARGEST[kind]


def test_an_unknown_kind_of_codes_is_refused() -> None:
    with pytest.raises(ValueError, match="int8, fp8_e4m3, fp8_e4m3fnuz"):
        rms_norm.rms_norm_codes(torch.ones(1, 8), torch.ones(8), 1e-6, "int7")


@triton.jit
def encode_kernel(x, out, N: tl.constexpr, KIND: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, encode(tl.load(x + at), KIND))


@pytest.mark.parametrize("kind", CODES[1:])
def test_every_fp8_number_and_all_between(kind: str) -> None:
    """Bit for bit torch's own conversion: every code, the middles between neighbours, and beside them."""
    dtype = codes_dtype(kind)
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort().values
    middles = (every[1:] + every[:-1]) / 2
    beside = torch.cat([m * f for m in (middles, every) for f in (1.0, 1 + 1e-6, 1 - 1e-6)])
    beside = beside.clamp(-LARGEST[kind], LARGEST[kind])
    x = torch.zeros(2048)
    x[: len(beside)] = beside
    out = torch.empty(2048, dtype=dtype)
    encode_kernel[(1,)](x, raw_codes(out), N=2048, KIND=kind)
    assert torch.equal(out.view(torch.uint8), x.to(dtype).view(torch.uint8))
