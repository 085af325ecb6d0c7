"""RMS norm of rows, alone, with the residual added first, and with the result quantised by row.

Zhang and Sennrich, "Root mean square layer normalization", 2019. One program takes whole rows: it
reads each number once when a row fits its registers, and otherwise goes over the row again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.numbers import codes_dtype, encode, raw_codes, row_scale
from octavo.kernels.triton.runtime import arch_of, launch
from octavo.kernels.triton.tiles import ARCHS, tile
from octavo.kernels.triton.variants import SHORT, Variant

if TYPE_CHECKING:
    import torch


@triton.jit
def load_row(x, residual, at, residual_at, mask, SUM: tl.constexpr, ADD: tl.constexpr):
    """Numbers of the stream in float32. ADD: x is added to the residual, rounded as it is stored."""
    value = tl.load(x + at, mask=mask, other=0.0)
    if ADD:
        if SUM:
            total = value.to(tl.float32) + tl.load(residual + residual_at, mask=mask, other=0.0).to(
                tl.float32
            )
            value = total.to(residual.dtype.element_ty)
            tl.store(residual + residual_at, value, mask=mask)
        else:
            value = tl.load(residual + residual_at, mask=mask, other=0.0)
    return value.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    scales,
    rows,
    n,
    heads,
    x_stride,
    x_head_stride,
    residual_stride,
    out_stride,
    out_head_stride,
    eps,
    offset,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    ADD: tl.constexpr,
    CODES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // heads).to(tl.int64), row % heads
    first = (token * x_stride + head * x_head_stride)[:, None]
    residual_first = (token * residual_stride)[:, None]
    out_first = (token * out_stride + head * out_head_stride)[:, None]
    live = (row < rows)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    if ONE_TILE:
        mask = live & (lane < n)
        value = load_row(x, residual, first + lane, residual_first + lane, mask, True, ADD)
        factor = tl.rsqrt(tl.sum(value * value, 1) / n + eps)[:, None]
        y = (
            value
            * factor
            * (offset + tl.load(weight + lane, mask=lane < n, other=0.0).to(tl.float32))
        )
        if CODES == "none":
            tl.store(out + out_first + lane, y.to(out.dtype.element_ty), mask=mask)
        else:
            y = tl.where(mask, y, 0.0)
            finite = tl.abs(y) < float("inf")
            good = tl.min(finite.to(tl.int32), 1) > 0
            inverse, scale = row_scale(tl.max(tl.abs(y), 1), good, CODES)
            tl.store(out + out_first + lane, encode(y * inverse[:, None], CODES), mask=mask)
            tl.store(scales + row, scale, mask=row < rows)
    else:
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, n, BLOCK):
            at = start + lane
            mask = live & (at < n)
            value = load_row(x, residual, first + at, residual_first + at, mask, True, ADD)
            squares += value * value
        factor = tl.rsqrt(tl.sum(squares, 1) / n + eps)[:, None]
        inverse = tl.full([ROWS], 1.0, tl.float32)
        if CODES != "none":
            most = tl.zeros([ROWS, BLOCK], tl.float32)
            bad = tl.zeros([ROWS, BLOCK], tl.int32)
            for start in range(0, n, BLOCK):
                at = start + lane
                mask = live & (at < n)
                value = load_row(x, residual, first + at, residual_first + at, mask, False, ADD)
                w = tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
                y = tl.where(mask, value * factor * (offset + w), 0.0)
                most = tl.maximum(most, tl.abs(y))
                bad = bad | (tl.abs(y) < float("inf")).to(tl.int32) ^ 1
            inverse, scale = row_scale(tl.max(most, 1), tl.max(bad, 1) == 0, CODES)
            tl.store(scales + row, scale, mask=row < rows)
        for start in range(0, n, BLOCK):
            at = start + lane
            mask = live & (at < n)
            value = load_row(x, residual, first + at, residual_first + at, mask, False, ADD)
            w = tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
            y = value * factor * (offset + w)
            if CODES == "none":
                tl.store(out + out_first + at, y.to(out.dtype.element_ty), mask=mask)
            else:
                tl.store(out + out_first + at, encode(y * inverse[:, None], CODES), mask=mask)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    eps: float,
    offset: float,
    codes: str,
) -> None:
    n, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    rows = x.numel() // n if n else 0
    shape = tile("rms_norm", arch_of(x.device), n, "float32")
    launch(
        rms_norm_kernel,
        (triton.cdiv(rows, shape.block_m),),
        x,
        x if residual is None else residual,
        weight,
        out,
        out if scales is None else scales,
        rows,
        n,
        heads,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        out.stride(1) if out.dim() == 3 else 0,
        eps,
        offset,
        tile=shape,
        ROWS=shape.block_m,
        BLOCK=shape.block_n,
        ONE_TILE=n <= shape.block_n,
        ADD=residual is not None,
        CODES=codes,
    )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, N] or [T, H, N] -> x / rms(x) · (offset + weight [N]), in x's dtype, rounded once.

    x may have any strides but the last, which is 1. `out` may be x itself.
    """
    out = x.new_empty(x.shape) if out is None else out
    _launch(x, None, weight, out, None, eps, offset, "none")
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(residual + x), residual + x) of [T, N] each; the sum is stored in `residual`'s memory and
    the norm in a new tensor. The norm is of the sum as it is stored, in its dtype."""
    out = x.new_empty(x.shape)
    _launch(x, residual, weight, out, None, eps, offset, "none")
    return out, residual


def rms_norm_codes(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    codes: str,
    *,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x [T, N] (of residual + x, stored in `residual`) as codes [T, N] and scales [T].

    codes: a name of `numbers.CODES`. Number = code · scale; the scale is the row's largest number over
    the largest code. A row with NaN or infinity gets zeros and a NaN scale.
    """
    import torch

    out = x.new_empty(x.shape, dtype=codes_dtype(codes))
    scales = x.new_empty(x.shape[0], dtype=torch.float32)
    _launch(x, residual, weight, raw_codes(out), scales, eps, offset, codes)
    return out, scales


def _variant(
    dtype: str,
    n: int,
    *,
    add: bool = False,
    codes: str = "none",
    heads: int = 1,
    archs: tuple[str, ...] = ARCHS,
) -> Variant:
    short = SHORT[dtype]
    strides = ("x_stride", "x_head_stride", "residual_stride", "out_stride", "out_head_stride")
    types = dict.fromkeys(("x", "residual", "weight", "out"), f"*{short}")
    types["scales"] = types["x"]
    if codes != "none":
        types |= {"out": "*i8" if codes == "int8" else "*u8", "scales": "*fp32"}
    types |= dict.fromkeys(("rows", "n", "heads", *strides), "i32")
    types |= {"eps": "fp32", "offset": "fp32"}
    fixed: dict[str, object] = {"ADD": add, "CODES": codes, "ONE_TILE": n <= 16384}
    if heads == 1:
        fixed["heads"] = 1
    words = ["rms_norm", short, f"n{n}", "heads" * (heads > 1), "add" * add, codes]
    return Variant(
        " ".join(word for word in words if word not in ("", "none")),
        rms_norm_kernel,
        {
            name: types[name]
            for name in rms_norm_kernel.arg_names
            if name in types and name not in fixed
        },
        fixed,
        tile=lambda arch: tile("rms_norm", arch, n, "float32"),
        tiled={"ROWS": "block_m", "BLOCK": "block_n"},
        aligned=("n", *strides),
        archs=archs,
    )


AOT: list[Variant] = [
    *(_variant(dtype, 4096, add=add) for dtype in SHORT for add in (False, True)),
    _variant("bfloat16", 128, heads=32),
    *(_variant("bfloat16", n, add=True) for n in (16384, 20480)),
    *(_variant("bfloat16", n, add=True, codes="int8") for n in (4096, 16384, 20480)),
    _variant("bfloat16", 4096, add=True, codes="fp8_e4m3"),
    _variant("bfloat16", 4096, add=True, codes="fp8_e4m3fnuz", archs=("gfx942",)),
]
