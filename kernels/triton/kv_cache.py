"""The KV cache of a layer: how it is stored, and the kernel that scatters new keys and values into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.numbers import encode, largest_code
from octavo.kernels.triton.runtime import launch
from octavo.kernels.triton.tiles import ARCHS, fallback_arch, tile
from octavo.kernels.triton.variants import SHORT, Variant

if TYPE_CHECKING:
    import torch

PLAIN, E4M3, E4M3_FNUZ, E4M3_BITS = 0, 1, 2, 3
"""How numbers are stored: in a float dtype, or as bytes that hold OCP's e4m3 or AMD's e4m3fnuz, converted by
the chip's own instruction; or e4m3 that the kernels take apart."""

FNUZ_ARCHS = ("gfx942",)
E4M3_ARCHS = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx950", "gfx1201")
"""Chips with instructions that convert 8-bit floats: e4m3fnuz, or OCP's e4m3."""


def takes_fp8(arch: str) -> bool:
    """Whether a chip is offered an 8-bit cache: not where taking codes apart spills registers."""
    return fallback_arch(arch) != "gfx1100"


def codes_of(kv_dtype: str, arch: str) -> int:
    """How a cache of `kv_dtype` ("fp8", or a float dtype) is stored on a chip."""
    if kv_dtype != "fp8":
        return PLAIN
    known = fallback_arch(arch)
    return E4M3_FNUZ if known in FNUZ_ARCHS else E4M3 if known in E4M3_ARCHS else E4M3_BITS


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's cache: k [blocks, block, kv_heads, D] and v [blocks, block, kv_heads, Dv], in a float
    dtype, or uint8 where `codes` is not `PLAIN`.

    k_scales, v_scales [kv_heads] float32: what a code is to be multiplied with.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor
    codes: int = PLAIN


@triton.jit
def _store(x, x_at, cache, to, scales, head, mask, KIND: tl.constexpr):
    value = tl.load(x + x_at, mask=mask, other=0.0)
    if KIND == "none":
        tl.store(cache + to, value.to(cache.dtype.element_ty), mask=mask)
    else:
        most = largest_code(KIND)
        value = value.to(tl.float32) / tl.load(scales + head)
        tl.store(cache + to, encode(tl.maximum(tl.minimum(value, most), -most), KIND), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def write_kernel(
    k, v, k_cache, v_cache, slots, k_scales, v_scales, tokens,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    k_cache_b, k_cache_p, k_cache_h, v_cache_b, v_cache_p, v_cache_h,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens / BLOCK_T, KV heads). slots [T] int64; a negative one is skipped."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    live = slot >= 0
    slot = tl.where(live, slot, 0)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    token = token.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k_at = (token * k_stride_t + head * k_stride_h)[:, None] + d[None, :]
    v_at = (token * v_stride_t + head * v_stride_h)[:, None] + dv[None, :]
    k_to = (block * k_cache_b + offset * k_cache_p + head * k_cache_h)[:, None] + d[None, :]
    v_to = (block * v_cache_b + offset * v_cache_p + head * v_cache_h)[:, None] + dv[None, :]
    _store(k, k_at, k_cache, k_to, k_scales, head, live[:, None] & (d < D)[None, :], KIND)
    _store(v, v_at, v_cache, v_to, v_scales, head, live[:, None] & (dv < D_V)[None, :], KIND)


def padded(size: int) -> int:
    """The smallest power of two of at least 16 that holds a head of `size` numbers."""
    return max(16, 1 << (size - 1).bit_length())


KINDS = {PLAIN: "none", E4M3: "fp8_e4m3", E4M3_FNUZ: "fp8_e4m3fnuz", E4M3_BITS: "fp8_e4m3"}
"""What codes are written as: made by integer arithmetic that every chip has."""


def write(cache: Cache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, arch: str) -> None:
    """Stores k [T, Hkv, D] and v [T, Hkv, Dv] at slots [T] (int64, block · block size + offset).

    A slot of -1 is skipped. Numbers too large for an 8-bit cache become its largest, NaN becomes 0.
    The last dimension of k and v has stride 1.
    """
    size, size_v = k.shape[2], v.shape[2]
    block_d, block_dv = padded(size), padded(size_v)
    tiled = tile("write_kv", arch, max(block_d, block_dv), "float32")
    launch(
        write_kernel,
        (-(-slots.shape[0] // tiled.block_m), k.shape[1]),
        *(k, v, cache.k, cache.v, slots, cache.k_scales, cache.v_scales, slots.shape[0]),
        *(*k.stride()[:2], *v.stride()[:2], *cache.k.stride()[:3], *cache.v.stride()[:3]),
        tile=tiled,
        D=size,
        D_V=size_v,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_SIZE=cache.k.shape[1],
        BLOCK_T=tiled.block_m,
        KIND=KINDS[cache.codes],
    )


_STRIDES = (
    *("k_stride_t", "k_stride_h", "v_stride_t", "v_stride_h"),
    *("k_cache_b", "k_cache_p", "k_cache_h", "v_cache_b", "v_cache_p", "v_cache_h"),
)


def _variant(dtype: str, size: int, kind: str = "none", archs: tuple[str, ...] = ARCHS) -> Variant:
    new, cache = f"*{SHORT[dtype]}", "*u8" if kind != "none" else f"*{SHORT[dtype]}"
    return Variant(
        f"write_kv {SHORT[dtype]} d{size}" + f" {kind}" * (kind != "none"),
        write_kernel,
        {"k": new, "v": new, "k_cache": cache, "v_cache": cache, "slots": "*i64"}
        | {"k_scales": "*fp32", "v_scales": "*fp32", "tokens": "i32"}
        | dict.fromkeys(_STRIDES, "i32"),
        {"D": size, "D_V": size, "BLOCK_D": padded(size), "BLOCK_DV": padded(size)}
        | {"BLOCK_SIZE": 16, "KIND": kind},
        tile=lambda arch: tile("write_kv", arch, padded(size), "float32"),
        tiled={"BLOCK_T": "block_m"},
        aligned=_STRIDES,
        archs=archs,
    )


AOT: list[Variant] = [
    *(_variant(dtype, size) for dtype in SHORT for size in (64, 128, 256)),
    _variant(
        "bfloat16", 128, "fp8_e4m3", tuple(a for a in ARCHS if a not in FNUZ_ARCHS and takes_fp8(a))
    ),
    _variant("bfloat16", 128, "fp8_e4m3fnuz", FNUZ_ARCHS),
]
