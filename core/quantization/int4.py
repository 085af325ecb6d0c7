"""int4: codes of 4 bits with a float16 scale and minimum for 32 inputs of an output.

The grid of GGUF's Q4_1, so that such a file's own codes are taken over, and Q4_0's and Q4_K's after
rounding their scales to float16.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from octavo.core.contract import WeightSpec
from octavo.core.quantization.base import Form, QuantizedTensor, Scheme, Shape

GROUP = 32
_GROUPS_AT_ONCE = 1 << 15  # 4 MiB of float32: stays in the cache


class Int4Form(Form):
    """codes uint8 in [0, 15], scales and minima float16 [N, K / group]."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    needs: ClassVar[str] = f"inputs in whole groups of {GROUP}"

    def holds(self, shape: Shape, group: int) -> bool:
        group = group or shape[-1]
        return (
            len(shape) == 2
            and shape[1] > 0
            and shape[1] % group == 0
            and group % 8 == 0
            and 8 <= group <= 4096
        )

    def nbytes(self, shape: Shape, group: int) -> int:
        elements = math.prod(shape)
        return elements // 2 + 4 * (elements // (group or shape[1]))

    def quantize(self, weight: torch.Tensor, group: int) -> QuantizedTensor:
        n, k = weight.shape
        group = group or k
        codes, scales, minima = [], [], []
        for block in torch.split(weight.reshape(-1, group), _GROUPS_AT_ONCE):
            groups = block.float()
            good = groups.isfinite().all(-1, keepdim=True)
            groups = torch.where(good, groups, 0.0)
            scale, low = _best_range(groups)
            codes.append(_codes(groups, scale, low).to(torch.uint8))
            scales.append(torch.where(good, scale, float("nan")).half())
            minima.append(low.half())
        flat = (torch.cat(codes), torch.cat(scales), torch.cat(minima))
        grid = (n, k // group)
        return QuantizedTensor(
            self.name,
            flat[0].view(n, k),
            flat[1].view(grid),
            flat[2].view(grid),
            group,
            torch.float32,
        )


def _codes(x: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    return torch.round((x - low) * inverse).clamp(0, 15)


def _best_range(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum [G, 1] of groups x [G, group], as float16 holds them.

    Besides the plain range [min, max] / 15, ranges some steps wider or narrower: the one with the
    least squared error wins.
    """

    def error(scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        return (x - (_codes(x, scale, low) * scale + low)).square().sum(-1, keepdim=True)

    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale, least_low = ((high - low) / 15).half().float(), low.half().float()
    least = error(scale, least_low)
    for levels in range(8, 18):
        step = ((high - low) / levels).half().float()
        for skip in (0, 1, 2) if levels < 15 else (0, -1, -2):
            start = (low - skip * 0.5 * step).half().float()
            found = error(step, start)
            better = found < least
            scale = torch.where(better, step, scale)
            least_low = torch.where(better, start, least_low)
            least = torch.where(better, found, least)
    return scale, least_low


class Int4(Scheme):
    """Linear layers in int4; the head and the embedding, which every token depends on, in int8."""

    name: ClassVar[str] = "int4"
    form: ClassVar[str] = "int4"

    @classmethod
    def from_weights(cls) -> Scheme:
        return cls()

    def choices(self, spec: WeightSpec) -> tuple[tuple[str, int], ...]:
        if spec.role == "linear":
            return (("int4", GROUP), ("int8", 0))
        return (("int8", 0),) if spec.role in ("head", "embedding") else ()
