"""A checkpoint's own codes, kept where their products are those of the float32 numbers they stand for.

GGUF's Q4_0, Q4_1, Q5_0 and Q8_0: code · scale of a float16 scale and a code of up to 8 bits is exact in float32,
and adding a float16 minimum rounds once, as unpacking them does. Nothing is quantised here, activations
neither: the model computes the same with a sixth to a quarter of float32's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch

from octavo.core.contract import WeightSpec
from octavo.core.loading.errors import WeightsError
from octavo.core.loading.gguf_codes import GROUP
from octavo.core.quantization.base import Form, QuantizedTensor, Scheme, Shape, Tensors


class KeptForm(Form):
    """Codes of a checkpoint. Products are with the activations as they are. halves: float16 numbers of a group."""

    halves: ClassVar[int]

    def holds(self, shape: Shape, group: int) -> bool:
        return len(shape) == 2 and group > 0 and group % 8 == 0 and shape[1] % group == 0

    def quantize(self, weight: torch.Tensor, group: int) -> QuantizedTensor:
        raise TypeError(f"{self.name} holds what a checkpoint has in codes, and quantises nothing")

    def seen(self, x: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
        return x.double()

    def nbytes(self, shape: Shape, group: int) -> int:
        elements = math.prod(shape)
        return elements * self.bits // 8 + 2 * self.halves * (elements // group)


class Codes4(KeptForm):
    """codes uint8 in [0, 15], scales and minima float16 [N, K / group]."""

    name: ClassVar[str] = "codes4"
    bits: ClassVar[int] = 4
    halves: ClassVar[int] = 2
    needs: ClassVar[str] = "a checkpoint in Q4_0 or Q4_1"


class Codes8(KeptForm):
    """codes int8, scales float16 [N, K / group]."""

    name: ClassVar[str] = "codes8"
    bits: ClassVar[int] = 8
    halves: ClassVar[int] = 1
    needs: ClassVar[str] = "a checkpoint in Q8_0 or Q5_0"


class Kept(Scheme):
    """The weights that a checkpoint has in codes stay in them; all others are float numbers."""

    name: ClassVar[str] = "kept codes"
    form: ClassVar[str] = "codes4"

    def __init__(self, forms: Mapping[str, str]) -> None:
        """forms: the checkpoint's tensors that are in codes, each with its form."""
        self._forms = forms

    def choices(self, spec: WeightSpec) -> tuple[tuple[str, int], ...]:
        """None for what is stacked of several kinds."""
        found = {self._forms.get(name) for name, _ in spec.parts}
        if spec.role not in ("linear", "head", "embedding") or len(found) > 1:
            return ()
        return tuple((name, GROUP) for name in found if name is not None)

    def read(
        self, spec: WeightSpec, name: str, shape: Shape, source: Tensors
    ) -> torch.Tensor | QuantizedTensor:
        if spec.scheme is None:
            return source.get(name)
        found = source.codes(name, spec.scheme, spec.group)
        if found is None:
            raise WeightsError(
                f"the codes of {name} have scales beyond what {spec.scheme} holds; use --no-keep-codes"
            )
        return found
