"""Products of 8-bit floats: weights with a scale for each output, activations quantised by row.

The range is that of Gaudi 2's format (240 where Gaudi 3 has 448), so one packing serves both chips. Offered
to the core once it knows a form "fp8"; until then no weight arrives with that scheme.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = 240.0


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """codes [out, in] float8_e4m3fn, scale [1, out] in the dtype of activations."""

    codes: torch.Tensor
    scale: torch.Tensor


def pack(weight: torch.Tensor, device: str, dtype: torch.dtype) -> Fp8Weight:
    """Quantises a weight [out, in] by outputs."""
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST
    codes = (wide / scale).to(torch.float8_e4m3fn)
    return Fp8Weight(codes.to(device), scale.T.contiguous().to(device=device, dtype=dtype))


def linear(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in] -> [T, out]."""
    scale = x.abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST
    codes = torch.ops.hpu.cast_to_fp8_v2(x, 1.0 / scale, False, False, torch.float8_e4m3fn)[0]
    out: torch.Tensor = torch.ops.hpu.fp8_gemm_v2(
        *(codes, False, weight.codes, True, None, x.dtype, scale, weight.scale, bias, False)
    )
    return out
