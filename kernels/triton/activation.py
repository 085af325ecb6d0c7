"""Gated activations: act(gate) · up, alone or quantised by row.

Shazeer, "GLU variants improve transformer", 2020; Hendrycks and Gimpel, "Gaussian error linear
units", 2016, with its approximation by tanh.
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

ACTS = ("silu", "gelu", "gelu_tanh")


@triton.jit
def activated(x, ACT: tl.constexpr):
    """x float32 after one of `ACTS`."""
    if ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # (1 + tanh(u)) / 2 is sigmoid(2u), which loses nothing to cancellation.
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gated(x, first, at, n, mask, ACT: tl.constexpr):
    """act(gate) · up in float32."""
    gate = tl.load(x + first + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + first + n + at, mask=mask, other=0.0).to(tl.float32)
    return activated(gate, ACT) * up


@triton.jit
def act_and_mul_kernel(
    x,
    out,
    rows,
    n,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows)[:, None] & (at < n)
    y = gated(x, row.to(tl.int64)[:, None] * x_stride, at, n, mask, ACT)
    to = out + row.to(tl.int64)[:, None] * out_stride + at
    tl.store(to, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def act_and_mul_codes_kernel(
    x,
    out,
    scales,
    rows,
    n,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACT: tl.constexpr,
    CODES: tl.constexpr,
):
    """Computes each number twice, once for the row's largest: reading is what takes the time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = row.to(tl.int64)[:, None] * x_stride
    lane = tl.arange(0, BLOCK)[None, :]
    live = (row < rows)[:, None]
    most = tl.zeros([ROWS, BLOCK], tl.float32)
    good = tl.full([ROWS, BLOCK], 1, tl.int32)
    for start in range(0, n, BLOCK):
        at = start + lane
        size = tl.abs(gated(x, first, at, n, live & (at < n), ACT))
        most = tl.maximum(most, size)
        good = good & (size < float("inf")).to(tl.int32)
    inverse, scale = row_scale(tl.max(most, 1), tl.min(good, 1) > 0, CODES)
    tl.store(scales + row, scale, mask=row < rows)
    for start in range(0, n, BLOCK):
        at = start + lane
        mask = live & (at < n)
        y = gated(x, first, at, n, mask, ACT)
        to = out + row.to(tl.int64)[:, None] * out_stride + at
        tl.store(to, encode(y * inverse[:, None], CODES), mask=mask)


def act_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x [T, 2n] -> act(x[:, :n]) · x[:, n:] in x's dtype, rounded once. kind: one of `ACTS`."""
    n = x.shape[1] // 2
    out = x.new_empty(x.shape[0], n)
    shape = tile("activation", arch_of(x.device), n, "float32")
    launch(
        act_and_mul_kernel,
        (triton.cdiv(x.shape[0], shape.block_m), triton.cdiv(n, shape.block_n)),
        *(x, out, x.shape[0], n, x.stride(0), out.stride(0)),
        tile=shape,
        ROWS=shape.block_m,
        BLOCK=shape.block_n,
        ACT=kind,
    )
    return out


def act_and_mul_codes(x: torch.Tensor, kind: str, codes: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as codes [T, n] and scales [T] float32; codes: a name of `numbers.CODES`.

    Number = code · scale. A row with NaN or infinity gets zeros and a NaN scale.
    """
    import torch

    n = x.shape[1] // 2
    out = x.new_empty(x.shape[0], n, dtype=codes_dtype(codes))
    scales = x.new_zeros(x.shape[0], dtype=torch.float32)
    shape = tile("activation", arch_of(x.device), n, "float32")
    launch(
        act_and_mul_codes_kernel,
        (triton.cdiv(x.shape[0], shape.block_m),),
        *(x, raw_codes(out), scales, x.shape[0], n, x.stride(0), out.stride(0)),
        tile=shape,
        ROWS=shape.block_m,
        BLOCK=shape.block_n,
        ACT=kind,
        CODES=codes,
    )
    return out, scales


def _variant(
    dtype: str, kind: str, *, codes: str = "none", archs: tuple[str, ...] = ARCHS
) -> Variant:
    plain = codes == "none"
    kernel = act_and_mul_kernel if plain else act_and_mul_codes_kernel
    types = {"x": f"*{SHORT[dtype]}", "out": f"*{SHORT[dtype]}", "scales": "*fp32"}
    if not plain:
        types["out"] = "*i8" if codes == "int8" else "*u8"
    types |= dict.fromkeys(("rows", "n", "x_stride", "out_stride"), "i32")
    return Variant(
        f"act_and_mul {SHORT[dtype]} {kind}" + ("" if plain else f" {codes}"),
        kernel,
        {name: types[name] for name in kernel.arg_names if name in types},
        {"ACT": kind} | ({} if plain else {"CODES": codes}),
        tile=lambda arch: tile("activation", arch, 14336, "float32"),
        tiled={"ROWS": "block_m", "BLOCK": "block_n"},
        aligned=("n", "x_stride", "out_stride"),
        archs=archs,
    )


AOT: list[Variant] = [
    *(_variant(dtype, "silu") for dtype in SHORT),
    *(_variant("bfloat16", kind) for kind in ACTS[1:]),
    *(_variant("bfloat16", kind, codes="int8") for kind in ACTS),
    _variant("bfloat16", "silu", codes="fp8_e4m3"),
    _variant("bfloat16", "silu", codes="fp8_e4m3fnuz", archs=("gfx942",)),
]
