"""Rotary positions in Triton's interpreter against float64, alone and on the way into the cache."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.triton import rotary
from octavo.kernels.triton.numbers import codes_dtype

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter rounds to bfloat16 towards zero, chips to nearest.
CLOSE = {torch.float32: 1e-6, torch.float16: 2**-11 * 1.01, torch.bfloat16: 2**-7 * 1.01}

# tokens, heads of q and k, size of a head, numbers that are turned, size of a value head
SHAPES = [
    (1, 1, 1, 2, 2, 1),
    (3, 4, 2, 64, 64, 64),
    (5, 9, 3, 80, 32, 48),
    (2, 3, 1, 128, 96, 128),
    (2, 20, 20, 24, 24, 24),
]


def turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The definition, pair by pair, as complex numbers in float64."""
    half = angles.shape[-1] // 2
    cos, sin = angles.double().unsqueeze(1).chunk(2, dim=-1)
    wide = x.double()
    part = wide[..., : 2 * half]
    if interleaved:
        pairs = part.unflatten(-1, (half, 2))
    else:
        pairs = part.unflatten(-1, (2, half)).transpose(-1, -2)
    done = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    done = done if interleaved else done.transpose(-1, -2)
    return torch.cat((done.flatten(-2), wide[..., 2 * half :]), dim=-1)


def case(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v as views of one product, angles and positions."""
    tokens, q_heads, heads, size, of, size_v = shape
    torch.manual_seed(sum(shape))
    fused = torch.randn(tokens, q_heads * size + heads * (size + size_v)).to(dtype)
    q, k, v = fused.split([q_heads * size, heads * size, heads * size_v], dim=1)
    angles = torch.randn(60, of // 2 * 2)
    return (
        q.view(tokens, q_heads, size),
        k.view(tokens, heads, size),
        v.view(tokens, heads, size_v),
        angles,
        torch.randint(0, 60, (tokens,)),
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_place(shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool) -> None:
    q, k, v, angles, positions = case(shape, dtype)
    kept = v.clone()
    wanted = [turned(x, angles[positions], interleaved) for x in (q, k)]
    got = rotary.rotary(q, k, angles, positions, interleaved=interleaved)
    for x, want, same in zip(got, wanted, (q, k), strict=True):
        assert x.data_ptr() == same.data_ptr()
        torch.testing.assert_close(x.double(), want, rtol=CLOSE[dtype], atol=2e-6)
    assert torch.equal(v, kept)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_into_the_cache(shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool) -> None:
    """The cache gets the bits that turning in place and then storing gives, and nothing else."""
    q, k, v, angles, positions = case(shape, dtype)
    tokens, _, heads, size, _, size_v = shape
    blocks, block = 4, 3
    caches = [torch.full((blocks, heads, block, n + 1), 7.0).to(dtype) for n in (size, size_v)]
    views = tuple(c.transpose(1, 2)[..., :-1] for c in caches)  # heads apart, rows with a gap
    slots = torch.randperm(blocks * block)[:tokens]
    slots[tokens // 2] = -1
    same_q, same_k, before = q.clone(), k.clone(), k.clone()
    rotary.rotary(same_q, same_k, angles, positions, interleaved=interleaved)
    rotary.rotary_write(q, k, v, views, angles, positions, slots, interleaved=interleaved)
    assert torch.equal(q, same_q) and torch.equal(k, before)
    live = slots >= 0
    for cache, view, new in zip(caches, views, (same_k, v), strict=True):
        want = torch.full_like(view, 7.0)
        want[slots[live] // block, slots[live] % block] = new[live]
        assert torch.equal(view, want)
        assert (cache[..., -1] == 7).all()


@pytest.mark.parametrize("codes", ["fp8_e4m3", "fp8_e4m3fnuz"])
def test_into_a_cache_of_8_bits(codes: str) -> None:
    shape = (4, 4, 2, 64, 48, 64)
    q, k, v, angles, positions = case(shape, torch.float32)
    v[1, 0, :3] = torch.tensor([1e9, -1e9, 0.0])
    dtype = codes_dtype(codes)
    most = torch.finfo(dtype).max
    caches = (torch.zeros(3, 2, 2, 64).to(dtype), torch.zeros(3, 2, 2, 64).to(dtype))
    scales = (torch.tensor([0.05, 0.02]), torch.tensor([0.01, 0.03]))
    slots = torch.tensor([5, 0, -1, 3])
    wanted = k.clone()
    rotary.rotary(q.clone(), wanted, angles, positions)
    rotary.rotary_write(q, k, v, caches, angles, positions, slots, codes=codes, scales=scales)
    for cache, new, scale in zip(caches, (wanted, v), scales, strict=True):
        want = (new / scale[:, None]).clamp(-most, most).to(dtype)
        got = cache.flatten(0, 1)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert torch.equal(got[slot].float(), want[token].float())
        assert (got[[1, 2, 4]].float() == 0).all()


def test_codes_want_scales() -> None:
    q, k, v, angles, positions = case(SHAPES[1], torch.float32)
    caches = (torch.zeros(1, 4, 2, 64), torch.zeros(1, 4, 2, 64))
    with pytest.raises(ValueError, match="one needs the other"):
        rotary.rotary_write(q, k, v, caches, angles, positions, positions, codes="fp8_e4m3")


def test_no_tokens() -> None:
    empty, angles = torch.empty(0, 2, 8), torch.ones(4, 8)
    q, k = rotary.rotary(empty, empty.clone(), angles, torch.empty(0, dtype=torch.int64))
    assert q.shape == k.shape == (0, 2, 8)
