"""int8: symmetric codes with a scale for each output.

Activations have a scale for 64 inputs of a token. With one for the whole token (the vector-wise
scheme of Dettmers et al. 2022, whose remedy is to keep outlier columns in float16) most of the loss
came from activations: a few large columns leave the others hardly any codes.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from octavo.core.contract import WeightSpec
from octavo.core.quantization.base import (
    ROWS_AT_ONCE,
    Form,
    QuantizedTensor,
    Scheme,
    Shape,
)

MAX_INPUTS = 65536  # up to here kernels' sums of extreme codes are exact
SHARED = 64  # activations that share a scale


class Int8Form(Form):
    """codes int8 in [-127, 127], scales float32 [N, 1]."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    needs: ClassVar[str] = f"at most {MAX_INPUTS} inputs"

    def holds(self, shape: Shape, group: int) -> bool:
        return len(shape) == 2 and 0 < shape[1] <= MAX_INPUTS and group in (0, shape[1])

    def nbytes(self, shape: Shape, group: int) -> int:
        return math.prod(shape) + 4 * shape[0]

    def quantize(self, weight: torch.Tensor, group: int) -> QuantizedTensor:
        codes, scales = [], []
        for rows in torch.split(weight, ROWS_AT_ONCE):
            wide = rows.float()
            good = wide.isfinite().all(-1, keepdim=True)
            most = torch.where(good, wide, 0.0).abs().amax(-1, keepdim=True)
            usable = most > 1e-30  # below, 127 / most is beyond float32
            inverse = torch.where(usable, 127.0 / most, 0.0)
            codes.append(torch.round(torch.where(good, wide, 0.0) * inverse).to(torch.int8))
            scale = torch.where(usable, most / 127.0, 0.0)
            scales.append(torch.where(good, scale, float("nan")))
        k = weight.shape[1]
        return QuantizedTensor(
            self.name, torch.cat(codes), torch.cat(scales), None, k, torch.float32
        )

    def shared(self, weight: QuantizedTensor) -> int:
        return SHARED


class Int8(Scheme):
    """Every linear layer, the head and the embedding in int8; norms and biases as they are."""

    name: ClassVar[str] = "int8"
    form: ClassVar[str] = "int8"

    @classmethod
    def from_weights(cls) -> Scheme:
        return cls()

    def choices(self, spec: WeightSpec) -> tuple[tuple[str, int], ...]:
        return (("int8", 0),) if spec.role in ("linear", "head", "embedding") else ()
