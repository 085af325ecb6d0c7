"""Ways to multiply by a weight on a CPU: the kernels' own, and those of torch and its guests.

All take float32 activations and give float32 results, as the engine keeps them: what a path converts on
the way is part of its cost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from octavo.backends.cpu import providers
from octavo.backends.cpu.backend import native_dtypes
from octavo.kernels import cpu as lib
from octavo.plugins import LinearPath

if TYPE_CHECKING:
    from octavo.core.instruments import Product

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "int8": 4e-2, "int4": 0.3}
"""Largest error as a share of the largest result, for random weights."""
GROUP = 32  # of int4, the same for all


def own(name: str) -> LinearPath:
    """The kernels' path for a format."""

    def pack(weight: torch.Tensor) -> Product:
        n, k = weight.shape
        packed = lib.PackedWeight(n, k, name, group=GROUP).pack([weight])

        def product(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty(x.shape[0], packed.n)
            lib.linear(out, x, packed)
            return out

        return product

    return LinearPath("octavo", name, TOLERANCE[name], pack)


def _plain(weight: torch.Tensor) -> Product:
    return lambda x: torch.nn.functional.linear(x, weight)


def _onednn(weight: torch.Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, None, "none", [], "")


def _bfloat16(weight: torch.Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), None)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x.bfloat16(), packed, None, "none", [], "").float()


def _fbgemm_fp16(weight: torch.Tensor) -> Product:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    multiply = torch.ops.quantized.linear_dynamic_fp16
    return lambda x: multiply(x, packed)


def _symmetric(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax(1).clamp_min(1e-12) / 127


def _fbgemm_int8(weight: torch.Tensor) -> Product:
    zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
    with (
        warnings.catch_warnings()
    ):  # torch is about to drop quantised tensors; this path ends with them
        warnings.simplefilter("ignore")
        scales = _symmetric(weight).double()
        codes = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(codes, None)
    multiply = torch.ops.quantized.linear_dynamic
    return lambda x: multiply(x, packed)


def _int8pack(weight: torch.Tensor) -> Product:
    scale = _symmetric(weight)
    codes = (weight / scale[:, None]).round().to(torch.int8)
    half = scale.bfloat16()
    return lambda x: torch._weight_int8pack_mm(x.bfloat16(), codes, half).float()


def _int4pack(weight: torch.Tensor) -> Product:
    n, k = weight.shape
    groups = weight.view(n, k // GROUP, GROUP)
    low, high = groups.aminmax(dim=2)
    scale = ((high - low) / 15).clamp_min(1e-12)
    codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).view(n, k), 1)
    zero = low + 8 * scale  # the value of code 8
    scales = torch.stack([scale, zero], 2).transpose(0, 1).contiguous().bfloat16()
    multiply = torch._weight_int4pack_mm_for_cpu
    return lambda x: multiply(x.bfloat16(), packed, GROUP, scales).float()


_TORCH: tuple[tuple[str, str, Callable[[torch.Tensor], Product]], ...] = (
    ("torch F.linear", "float32", _plain),
    ("torch oneDNN packed", "float32", _onednn),
    ("torch FBGEMM fp16", "float16", _fbgemm_fp16),
    ("torch oneDNN packed", "bfloat16", _bfloat16),
    ("torch FBGEMM dynamic", "int8", _fbgemm_int8),
    ("torch int8pack", "int8", _int8pack),
    ("torch int4pack", "int4", _int4pack),
)


def linear_paths() -> tuple[list[LinearPath], dict[str, str]]:
    """Those that multiply a small weight rightly here, the kernels' own first; the others by name, with
    the reason."""
    usable = [own(name) for name in TOLERANCE]
    refused: dict[str, str] = {}
    for name, kind, pack in _TORCH:
        if kind == "bfloat16" and "bfloat16" not in native_dtypes():
            refused[f"{name} {kind}"] = "this CPU has no bfloat16 products"
            continue
        path = LinearPath(name, kind, TOLERANCE[kind], pack)
        try:
            wrong = error(path, *example(64, 96, 3))
        except (RuntimeError, AttributeError, TypeError) as failure:
            refused[f"{name} {kind}"] = str(failure).split("\n", 1)[0]
            continue
        if wrong > path.tolerance:
            refused[f"{name} {kind}"] = f"wrong by {wrong:.1%} of the largest result"
        else:
            usable.append(path)
    for provider in providers.PROVIDERS:
        reason = provider.unusable()
        if reason is None:
            usable.append(provider.path)
        else:
            refused[f"{provider.name} {provider.path.format}"] = reason
    return usable, refused


def example(n: int, k: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random weight [n, k] and activations [rows, k], always the same."""
    dice = torch.Generator().manual_seed(7)
    return torch.randn(n, k, generator=dice) * k**-0.5, torch.randn(rows, k, generator=dice)


def error(path: LinearPath, weight: torch.Tensor, x: torch.Tensor) -> float:
    """The largest error of x · weightᵀ as a share of the largest result; NaN counts as infinite."""
    want = x.double() @ weight.double().T
    off = (path.pack(weight)(x).double() - want).abs().max() / want.abs().max()
    return float(off) if off == off else float("inf")
