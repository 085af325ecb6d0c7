"""Gated activations in Triton's interpreter against float64."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.core.quantization.base import quantize_rows
from octavo.kernels.triton import activation
from octavo.kernels.triton.activation import ACTS
from octavo.kernels.triton.numbers import CODES, codes_dtype

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter rounds to bfloat16 towards zero, chips to nearest.
CLOSE = {torch.float32: 1e-6, torch.float16: 2**-11 * 1.01, torch.bfloat16: 2**-7 * 1.01}


def wanted(x: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    if kind == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if kind == "gelu":
        return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * (1 + torch.tanh(inner)) / 2 * up


@pytest.mark.parametrize("kind", ACTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (7, 33), (3, 1500), (2, 5000)])
def test_act_and_mul(kind: str, dtype: torch.dtype, rows: int, n: int) -> None:
    torch.manual_seed(n)
    x = (torch.randn(rows, 2 * n + 3) * 4).to(dtype)[:, : 2 * n]
    out = activation.act_and_mul(x, kind)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted(x, kind), rtol=CLOSE[dtype], atol=2e-6)
    alone = activation.act_and_mul(x[-1:], kind)
    assert torch.equal(alone[0], out[-1])


@pytest.mark.parametrize("kind", ACTS)
def test_far_from_zero(kind: str) -> None:
    gate = torch.tensor([-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4])
    x = torch.cat([gate, torch.ones(7)])[None]
    torch.testing.assert_close(activation.act_and_mul(x, kind)[0], gate.clamp_min(0.0))


@pytest.mark.parametrize("kind", ACTS)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("rows", "n"), [(6, 70), (2, 4500)])
def test_codes(kind: str, codes: str, rows: int, n: int) -> None:
    torch.manual_seed(n)
    x = torch.randn(rows, 2 * n) * 2
    plain = activation.act_and_mul(x, kind)
    out, scales = activation.act_and_mul_codes(x, kind, codes)
    assert out.dtype == codes_dtype(codes)
    most = 127.0 if codes == "int8" else torch.finfo(out.dtype).max
    torch.testing.assert_close(scales, plain.abs().amax(-1) / most)
    if codes == "int8":
        assert (out.float() - quantize_rows(plain, n)[0][:, 0]).abs().max() <= 1
    back = out.float() * scales[:, None]
    step = 0.501 if codes == "int8" else 2**-9
    share = 0.0 if codes == "int8" else 2**-4 * 1.001
    assert ((back - plain).abs() <= share * plain.abs() + step * scales[:, None]).all()


def test_codes_of_a_row_that_is_not_finite() -> None:
    x = torch.randn(3, 20)
    x[0, 15] = float("nan")
    x[1, 15] = float("inf")
    out, scales = activation.act_and_mul_codes(x, "silu", "int8")
    assert scales[:2].isnan().all() and (out[:2] == 0).all()
    assert scales[2] > 0 and out[2].abs().max() == 127


def test_no_rows() -> None:
    assert activation.act_and_mul(torch.empty(0, 8), "silu").shape == (0, 4)
    codes, scales = activation.act_and_mul_codes(torch.empty(0, 8), "silu", "int8")
    assert codes.shape == (0, 4) and scales.shape == (0,)
