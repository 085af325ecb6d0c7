"""Norms, rotary embedding, gated activations and block copies against float64 references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels import cpu
from octavo.kernels.cpu import checked

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place of the result, and what float32 arithmetic adds.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11 * 1.01}


def close(got: torch.Tensor, want: torch.Tensor, scale: float = 1.0) -> None:
    t = TOLERANCE[got.dtype] * scale
    torch.testing.assert_close(got.double(), want, rtol=t, atol=2e-7 * scale)


def strided(rows: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """A [rows, n] view into a wider matrix."""
    return torch.randn(rows, n + 5).to(dtype)[:, 3 : 3 + n]


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(isa: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    for rows, n, offset in [
        (1, 1, 0.0),
        (3, 7, 1.0),
        (2, 16, 0.0),
        (40, 576, 0.0),
        (5, 1001, 1.0),
        (90, 2048, 0.0),
    ]:
        x, weight = strided(rows, n, dtype), torch.randn(n).to(weight_dtype)
        out = torch.full((rows + 1, n), 7.0, dtype=dtype)
        checked.rms_norm(out[:rows], x, weight, 1e-5, offset)
        d = x.double()
        want = d * (d.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight.double() + offset)
        close(out[:rows], want, 2)
        assert (out[rows] == 7).all()
        alone = torch.empty(1, n, dtype=dtype)
        checked.rms_norm(alone, x[-1:], weight, 1e-5, offset)
        assert torch.equal(alone[0], out[rows - 1])


def test_rms_norm_of_heads(isa: str) -> None:
    fused = torch.randn(50, 3 * 4 * 64)
    x, weight = fused[:, 256:512].view(50, 4, 64), torch.randn(64)
    want = F.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    checked.rms_norm(x, x, weight, 1e-6)
    close(x, want, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(isa: str, dtype: torch.dtype) -> None:
    for rows, n in [(1, 5), (3, 576), (100, 513)]:
        x, residual, weight = strided(rows, n, dtype), strided(rows, n, dtype), torch.randn(n)
        want_residual = (residual.float() + x.float()).to(dtype)
        d = want_residual.double()
        checked.add_rms_norm(x, residual, x, weight, 1e-5)
        assert torch.equal(residual, want_residual)
        close(x, d * (d.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double(), 2)


def rotated(x: torch.Tensor, cos_sin: torch.Tensor, style: int) -> torch.Tensor:
    x, cos, sin = x.double(), *cos_sin.double()[:, None].chunk(2, -1)
    dim = cos_sin.shape[1]
    if style == cpu.NEOX:
        a, b = x[..., : dim // 2], x[..., dim // 2 : dim]
        y = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = x[..., 0:dim:2], x[..., 1:dim:2]
        y = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([y, x[..., dim:]], -1)


@pytest.mark.parametrize("style", [cpu.NEOX, cpu.INTERLEAVED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary(isa: str, dtype: torch.dtype, style: int) -> None:
    for tokens, q_heads, kv_heads, size, dim, integer in [
        (1, 1, 1, 8, 8, torch.int64),
        (5, 3, 1, 64, 64, torch.int32),
        (70, 9, 3, 64, 32, torch.int64),
        (9, 2, 2, 80, 20, torch.int32),
        (33, 4, 2, 128, 128, torch.int64),
    ]:
        angles = torch.arange(100)[:, None] / 10 ** (torch.arange(dim // 2) / dim)
        table = torch.cat([angles.cos(), angles.sin()], -1)
        positions = torch.randint(0, 100, (tokens,), dtype=integer)
        fused = torch.randn(tokens, (q_heads + kv_heads) * size).to(dtype)
        q, k = fused[:, : q_heads * size], fused[:, q_heads * size :]
        want_q = rotated(q.view(tokens, q_heads, size), table[positions.long()], style)
        want_k = rotated(k.view(tokens, kv_heads, size), table[positions.long()], style)
        if tokens > 5:
            positions[3] = -1  # padding stays as it is
            want_q[3], want_k[3] = q[3].view(q_heads, size), k[3].view(kv_heads, size)
        checked.rotary(q, k, positions, table, head_size=size, style=style)
        close(q.view(tokens, q_heads, size), want_q)
        close(k.view(tokens, kv_heads, size), want_k)


ACTIVATIONS = {
    "silu": F.silu,
    # By erfc: torch's own 1 + erf cancels in the left tail, even in float64.
    "gelu": lambda x: 0.5 * x * torch.special.erfc(-x * 0.5**0.5),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_act_and_mul(isa: str, dtype: torch.dtype, kind: str) -> None:
    for rows, n in [(1, 1), (3, 13), (2, 1536), (1, 20000), (65, 300)]:
        x = (torch.randn(rows, 2 * n + 3) * 3).to(dtype)[:, : 2 * n]
        out = torch.full((rows, n + 2), 7.0, dtype=dtype)
        checked.act_and_mul(out[:, :n], x, kind)
        want = ACTIVATIONS[kind](x[:, :n].double()) * x[:, n:].double()
        close(out[:, :n], want, 2)
        assert (out[:, n:] == 7).all()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_over_the_whole_range(isa: str, kind: str) -> None:
    x = torch.cat([torch.linspace(-30, 30, 100001), torch.tensor([1e-30, -1e-30, 0.0, 1e30])])
    out = torch.empty(1, len(x))
    checked.act_and_mul(out, torch.cat([x, torch.ones_like(x)])[None], kind)
    want = ACTIVATIONS[kind](x.double())
    # The left tails fall off like exp(-x^2 / 2): float32 loses digits in that exponent.
    near = x > {"silu": -20, "gelu": -5, "gelu_tanh": -4}[kind]
    torch.testing.assert_close(out[0].double()[near], want[near], rtol=3e-6, atol=1e-30)
    torch.testing.assert_close(out[0].double(), want, rtol=1e-6, atol=1e-6)
    special = torch.tensor([float("nan"), float("inf"), -1e30, -200.0])
    out = torch.empty(1, 4)
    checked.act_and_mul(out, torch.cat([special, torch.ones(4)])[None], kind)
    assert out[0, 0].isnan()
    assert out[0, 1] == float("inf")
    assert out[0, 2:].abs().max() == 0


def test_half_conversions_match_torch(isa: str) -> None:
    """Every float16 and bfloat16 bit pattern through a kernel, and float32 rounding ties."""
    for dtype in (torch.float16, torch.bfloat16):
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        x = bits.view(dtype).reshape(1, -1)
        zero = torch.zeros_like(x)
        out = torch.empty_like(x)
        checked.add_rms_norm(out, zero, x, torch.ones(x.shape[1]), 1e-5)  # zero += x
        same = (zero == x) | (zero.isnan() & x.isnan())
        assert same.all()
        a = bits.view(dtype)[torch.randperm(2**16)][None]
        b = x.clone()
        want = (a.float() + b.float()).to(dtype)
        checked.add_rms_norm(out, b, a, torch.ones(x.shape[1]), 1e-5)
        assert ((b == want) | (b.isnan() & want.isnan())).all()


@pytest.mark.parametrize("shape", [(7, 2, 16, 16), (40, 3, 16, 128)])
def test_block_copies(isa: str, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        cache = torch.randn(shape).to(dtype)
        want = cache.clone()
        pairs = torch.tensor([[0, 3], [3, 5], [1, 2]])  # the second reads what the first wrote
        for a, b in pairs.tolist():
            want[b] = want[a]
        checked.copy_blocks(cache, pairs)
        assert torch.equal(cache, want)
        ids = torch.randperm(shape[0])[: shape[0] // 2]
        out = torch.empty(len(ids), *shape[1:], dtype=dtype)
        checked.gather_blocks(out, cache, ids)
        assert torch.equal(out, cache[ids])
        out.neg_()
        want[ids] = out
        checked.scatter_blocks(cache, out, ids)
        assert torch.equal(cache, want)
        with pytest.raises(ValueError, match="outside"):
            checked.gather_blocks(out[:1], cache, torch.tensor([shape[0]]))
