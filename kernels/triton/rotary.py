"""Rotary positions: q and k turned in place, or turned on the way into the KV cache.

Su et al., "RoFormer", 2021. The first R numbers of a head are R/2 pairs: (i, i + R/2), or neighbours
where `interleaved`; the rest of a head stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.numbers import encode, largest_code, raw_codes
from octavo.kernels.triton.runtime import arch_of, launch
from octavo.kernels.triton.tiles import ARCHS, Tile, tile
from octavo.kernels.triton.variants import SHORT, Variant

if TYPE_CHECKING:
    import torch


@triton.jit
def turned(first, second, cos, sin):
    """Pairs of numbers, float32, turned by their angles."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def load_angles(cos_sin, position, angle_stride, half, HALF: tl.constexpr):
    """Cosines and sines [1, HALF] float32 of a position."""
    pair = tl.arange(0, HALF)
    at = cos_sin + position * angle_stride + pair
    mask = pair < half
    cos = tl.load(at, mask=mask, other=1.0).to(tl.float32)
    return cos[None, :], tl.load(at + half, mask=mask, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_pairs(x, offsets, half, live, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second numbers [HEADS, HALF] of the pairs. offsets [HEADS]: where each head begins.
    Neighbours are read side by side and parted in registers."""
    if INTERLEAVED:
        lane = tl.arange(0, 2 * HALF)
        mask = live[:, None] & (lane < 2 * half)[None, :]
        both = tl.load(x + offsets[:, None] + lane[None, :], mask=mask, other=0.0)
        return tl.split(tl.reshape(both, [both.shape[0], HALF, 2]))
    else:
        pair = tl.arange(0, HALF)
        mask = live[:, None] & (pair < half)[None, :]
        at = x + offsets[:, None] + pair[None, :]
        return tl.load(at, mask=mask, other=0.0), tl.load(at + half, mask=mask, other=0.0)


@triton.jit
def store_pairs(
    x, offsets, first, second, half, live, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The inverse of `load_pairs`."""
    if INTERLEAVED:
        lane = tl.arange(0, 2 * HALF)
        mask = live[:, None] & (lane < 2 * half)[None, :]
        tl.store(x + offsets[:, None] + lane[None, :], tl.interleave(first, second), mask=mask)
    else:
        pair = tl.arange(0, HALF)
        mask = live[:, None] & (pair < half)[None, :]
        at = x + offsets[:, None] + pair[None, :]
        tl.store(at, first, mask=mask)
        tl.store(at + half, second, mask=mask)


@triton.jit
def turn_heads(x, offsets, half, cos, sin, live, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Turns heads in memory. offsets [HEADS]: where each begins."""
    first, second = load_pairs(x, offsets, half, live, HALF, INTERLEAVED)
    one, other = turned(first.to(tl.float32), second.to(tl.float32), cos, sin)
    kind = x.dtype.element_ty
    store_pairs(x, offsets, one.to(kind), other.to(kind), half, live, HALF, INTERLEAVED)


@triton.jit
def rotary_kernel(
    q,
    k,
    cos_sin,
    positions,
    q_heads,
    k_heads,
    half,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    angle_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Program (token, i): heads i · HEADS onward of q, after the last of them those of k."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    cos, sin = load_angles(cos_sin, position, angle_stride, half, HALF)
    of_q = tl.cdiv(q_heads, HEADS)
    if tl.program_id(1) < of_q:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        offsets = token * q_stride + head * q_head_stride
        turn_heads(q, offsets, half, cos, sin, head < q_heads, HALF, INTERLEAVED)
    else:
        head = (tl.program_id(1) - of_q) * HEADS + tl.arange(0, HEADS)
        offsets = token * k_stride + head * k_head_stride
        turn_heads(k, offsets, half, cos, sin, head < k_heads, HALF, INTERLEAVED)


@triton.jit
def load_scales(scales, head, live, CODES: tl.constexpr):
    """What a head's numbers are divided by before they are coded, [HEADS, 1]."""
    if CODES == "none":
        return 1.0
    else:
        return tl.load(scales + head, mask=live, other=1.0)[:, None]


@triton.jit
def stored(x, scale, cache, CODES: tl.constexpr):
    """float32 as the cache keeps it: in its dtype, or as codes of x / scale, saturating."""
    if CODES == "none":
        return x.to(cache.dtype.element_ty)
    else:
        most = largest_code(CODES)
        return encode(tl.maximum(tl.minimum(x / scale, most), -most), CODES)


@triton.jit
def copy_heads(x, at, cache, to, lane, start, size, live, scale, CODES: tl.constexpr):
    """Numbers `start` to `size` of each head, as they are. at, to [HEADS]: where the heads begin."""
    mask = live[:, None] & (lane >= start)[None, :] & (lane < size)[None, :]
    value = tl.load(x + at[:, None] + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(cache + to[:, None] + lane[None, :], stored(value, scale, cache, CODES), mask=mask)


@triton.jit
def rotary_write_kernel(
    q,
    k,
    v,
    k_cache,
    v_cache,
    cos_sin,
    positions,
    slots,
    k_scales,
    v_scales,
    q_heads,
    kv_heads,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    angle_stride,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    PAIRS: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_V: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CODES: tl.constexpr,
):
    """Program (token, i): as in `rotary_kernel`, but heads of k go, turned, to the token's slot of the
    cache, and those of v with them. k and v themselves stay as they are; a slot of -1 is skipped."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    cos, sin = load_angles(cos_sin, position, angle_stride, PAIRS, HALF)
    of_q = tl.cdiv(q_heads, HEADS)
    if tl.program_id(1) < of_q:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        offsets = token * q_stride + head * q_head_stride
        turn_heads(q, offsets, PAIRS, cos, sin, head < q_heads, HALF, INTERLEAVED)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            head = (tl.program_id(1) - of_q) * HEADS + tl.arange(0, HEADS)
            live = head < kv_heads
            k_scale = load_scales(k_scales, head, live, CODES)
            v_scale = load_scales(v_scales, head, live, CODES)
            block, row = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            at = token * k_stride + head * k_head_stride
            to = block * k_block + row * k_slot + head * k_head
            first, second = load_pairs(k, at, PAIRS, live, HALF, INTERLEAVED)
            one, other = turned(first.to(tl.float32), second.to(tl.float32), cos, sin)
            # Rounded as it would be in place, so that fused and unfused steps cache the same bits.
            one = stored(one.to(k.dtype.element_ty).to(tl.float32), k_scale, k_cache, CODES)
            other = stored(other.to(k.dtype.element_ty).to(tl.float32), k_scale, k_cache, CODES)
            store_pairs(k_cache, to, one, other, PAIRS, live, HALF, INTERLEAVED)
            lane = tl.arange(0, SIZE)
            copy_heads(k, at, k_cache, to, lane, 2 * PAIRS, D, live, k_scale, CODES)
            at = token * v_stride + head * v_head_stride
            to = block * v_block + row * v_slot + head * v_head
            lane = tl.arange(0, SIZE_V)
            copy_heads(v, at, v_cache, to, lane, 0, D_V, live, v_scale, CODES)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns q [T, Hq, D] and k [T, Hkv, D] in place by their positions [T] and returns them.

    cos_sin [P, R]: R/2 cosines and R/2 sines a position, R <= D. Heads may lie anywhere; their
    numbers are side by side.
    """
    half = cos_sin.shape[1] // 2
    shape = tile("rotary", arch_of(q.device), half, "float32")
    per = shape.block_m
    heads = triton.cdiv(q.shape[1], per) + triton.cdiv(k.shape[1], per)
    launch(
        rotary_kernel,
        (q.shape[0] if half else 0, heads),
        *(q, k, cos_sin, positions, q.shape[1], k.shape[1], half),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos_sin.stride(0)),
        tile=shape,
        HEADS=per,
        HALF=shape.block_n,
        INTERLEAVED=interleaved,
    )
    return q, k


def rotary_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool = False,
    codes: str = "none",
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Turns q in place, and stores k, turned, and v [T, Hkv, Dv] at their slots of the cache.

    cache: two tensors [blocks, block, Hkv, D] and [.., Dv], whose last dimension has stride 1. slots
    [T]: block · block size + row, or -1. codes: "none", or the fp8 form of `numbers.CODES` that the
    caches keep, with scales [Hkv] float32 for keys and values (number = code · scale; larger saturate).
    """
    if (codes == "none") != (scales is None):
        raise ValueError(f"a cache of {codes!r} codes with scales {scales}: one needs the other")
    k_cache, v_cache = cache if codes == "none" else (raw_codes(cache[0]), raw_codes(cache[1]))
    half, size, size_v = cos_sin.shape[1] // 2, k.shape[2], v.shape[2]
    shape = tile("rotary", arch_of(q.device), max(size, size_v), "float32")
    per = shape.block_m
    launch(
        rotary_write_kernel,
        (q.shape[0], triton.cdiv(q.shape[1], per) + triton.cdiv(k.shape[1], per)),
        *(q, k, v, k_cache, v_cache, cos_sin, positions, slots, *(scales or (q, q))),
        *(q.shape[1], k.shape[1]),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(cos_sin.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3]),
        tile=shape,
        PAIRS=half,
        D=size,
        D_V=size_v,
        BLOCK_SIZE=k_cache.shape[1],
        HEADS=per,
        HALF=_power(half),
        SIZE=_power(size),
        SIZE_V=_power(size_v),
        INTERLEAVED=interleaved,
        CODES=codes,
    )
    return q


_STRIDES = ("q_stride", "q_head_stride", "k_stride", "k_head_stride", "angle_stride")
_CACHE = (
    *("v_stride", "v_head_stride"),
    *("k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head"),
)


def _variant(dtype: str, size: int, turned: int, *, interleaved: bool = False) -> Variant:
    half = turned // 2
    types = dict.fromkeys(("q", "k"), f"*{SHORT[dtype]}") | {
        "cos_sin": "*fp32",
        "positions": "*i64",
    }
    types |= dict.fromkeys(("q_heads", "k_heads", "half", *_STRIDES), "i32")
    words = ["rotary", SHORT[dtype], f"d{size}", f"of{turned}", "interleaved" * interleaved]
    return Variant(
        " ".join(word for word in words if word),
        rotary_kernel,
        types,
        {"INTERLEAVED": interleaved},
        tile=lambda arch: tile("rotary", arch, half, "float32"),
        tiled={"HEADS": "block_m", "HALF": "block_n"},
        aligned=(*_STRIDES, *(("half",) if half % 16 == 0 else ())),
    )


def _write_variant(
    dtype: str,
    size: int,
    turned: int,
    *,
    codes: str = "none",
    interleaved: bool = False,
    archs: tuple[str, ...] = ARCHS,
) -> Variant:
    short, half = SHORT[dtype], turned // 2
    kept = f"*{short}" if codes == "none" else "*u8"
    scale = f"*{short}" if codes == "none" else "*fp32"
    types = dict.fromkeys(("q", "k", "v"), f"*{short}") | {"k_cache": kept, "v_cache": kept}
    types |= {"cos_sin": "*fp32", "positions": "*i64", "slots": "*i64"}
    types |= {"k_scales": scale, "v_scales": scale}
    types |= dict.fromkeys(("q_heads", "kv_heads", *_STRIDES, *_CACHE), "i32")
    sizes = {"PAIRS": half, "HALF": _power(half), "D": size, "D_V": size, "BLOCK_SIZE": 16}
    words = ["rotary_write", short, f"d{size}", f"of{turned}", codes, "interleaved" * interleaved]

    def shape(arch: str) -> Tile:
        return tile("rotary", arch, size, "float32")

    return Variant(
        " ".join(word for word in words if word not in ("", "none")),
        rotary_write_kernel,
        {name: types[name] for name in rotary_write_kernel.arg_names if name in types},
        sizes | {"INTERLEAVED": interleaved, "CODES": codes},
        tile=shape,
        tiled={"HEADS": "block_m", "SIZE": "block_n", "SIZE_V": "block_n"},
        aligned=(*_STRIDES, *_CACHE),
        archs=archs,
    )


AOT: list[Variant] = [
    *(_variant(dtype, 128, 128) for dtype in SHORT),
    _variant("bfloat16", 128, 128, interleaved=True),
    _variant("bfloat16", 256, 64),
    *(_write_variant(dtype, 128, 128) for dtype in SHORT),
    _write_variant("bfloat16", 128, 128, interleaved=True),
    _write_variant("bfloat16", 256, 64),
    _write_variant("bfloat16", 128, 128, codes="fp8_e4m3"),
    _write_variant("bfloat16", 128, 128, codes="fp8_e4m3fnuz", archs=("gfx942",)),
]
