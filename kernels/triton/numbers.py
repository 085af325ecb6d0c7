"""Pieces of arithmetic that several kernels share: rounding, codes of 8 bits, counter-based noise.

All of it is plain integer and float32 arithmetic, the same on every architecture and in Triton's
interpreter: no code of 8 bits and no random bit depends on what a chip can convert by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

CODES = ("int8", "fp8_e4m3", "fp8_e4m3fnuz")
"""Forms of 8 bits that kernels write: symmetric integers, OCP's e4m3, and e4m3 of AMD's gfx94x."""


def codes_dtype(kind: str) -> torch.dtype:
    """The torch dtype of one of `CODES`. Raises ValueError for another name."""
    import torch

    if kind not in CODES:
        raise ValueError(f"no codes of kind {kind!r}; there are {', '.join(CODES)}")
    return (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)[CODES.index(kind)]


def raw_codes(out: torch.Tensor) -> torch.Tensor:
    """The same memory in the dtype that kernels write: int8, or uint8 for fp8 numbers."""
    import torch

    return out if out.dtype == torch.int8 else out.view(torch.uint8)


@triton.jit
def round_even(x):
    """x float32, |x| < 2^22, to the nearest whole number; halves go to the even one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def fp8_e4m3(x, BIAS: tl.constexpr, MOST: tl.constexpr):
    """x float32, finite, as uint8: sign, 4 bits of exponent, 3 of mantissa; nearest even, saturating.

    BIAS 7, MOST 448: e4m3fn (OCP 8-bit floating point, revision 1.0). BIAS 8, MOST 240: e4m3fnuz, which
    has one zero, so that a negative number that rounds to nothing loses its sign.
    """
    size = tl.minimum(tl.abs(x), MOST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    # Below the smallest normal number codes are equally spaced; eight of them reach it.
    tiny = round_even(size * (1 << (BIAS + 2))).to(tl.int32)
    code = tl.where(size < 2.0 ** (1 - BIAS), tiny, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    if BIAS == 8:
        sign = tl.where(code == 0, 0, sign)
    return (code | sign).to(tl.uint8)


@triton.jit
def largest_code(KIND: tl.constexpr):
    """The largest number that a code of this kind stands for."""
    if KIND == "int8":
        return 127.0
    elif KIND == "fp8_e4m3":
        return 448.0
    else:
        return 240.0


@triton.jit
def row_scale(most, good, KIND: tl.constexpr):
    """What to multiply a row with before it is rounded to codes, and the scale to store with them.

    most: the row's largest absolute number; good: whether it has neither NaN nor infinity. A row that
    is not good gets codes of 0 and a NaN scale, one too small for a scale zeros: the rule of
    `octavo.core.quantization.base.quantize_rows`.
    """
    inverse = largest_code(KIND) / most
    usable = good & (inverse < float("inf"))
    inverse = tl.where(usable, inverse, 0.0)
    scale = tl.where(usable, most / largest_code(KIND), 0.0)
    return inverse, tl.where(good, scale, float("nan"))


@triton.jit
def encode(x, KIND: tl.constexpr):
    """x float32, already divided by its scale, as codes: int8, or the bits of an fp8 number."""
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    if KIND == "int8":
        return round_even(tl.maximum(tl.minimum(x, 127.0), -127.0)).to(tl.int8)
    elif KIND == "fp8_e4m3":
        return fp8_e4m3(x, 7, 448.0)
    else:
        return fp8_e4m3(x, 8, 240.0)


@triton.jit
def order_key(x):
    """int32 that compare like the float32 numbers x do (no NaN); both zeros have the key 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_value(key):
    """The float32 numbers that have these keys."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def splitmix64(x):
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. x uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def draw_key(seed, counter):
    """Two uint32 words from a row's seed and the index of its output token, both int64."""
    inner = splitmix64(counter.to(tl.uint64, bitcast=True))
    key = splitmix64(seed.to(tl.uint64, bitcast=True) ^ inner)
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def mix32(h):
    """MurmurHash3's 32-bit finaliser. h uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def uniform(ids, low, high):
    """float32 in (0, 1) for vocabulary ids (int32), bit for bit those of `octavo.core.ops.uniform_bits`."""
    h = ids.to(tl.uint32, bitcast=True) * 0x9E3779B1 + low
    h = mix32(h ^ high)
    h = mix32(h + high)
    return ((h >> 9).to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * (2.0**-23)


@triton.jit
def gumbel(ids, low, high):
    """Gumbel noise for vocabulary ids: the largest of logit + noise is a draw from the softmax."""
    return -tl.log(-tl.log(uniform(ids, low, high)))
