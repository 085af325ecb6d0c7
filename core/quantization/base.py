"""What quantisation is made of: canonical forms, and schemes that lead a model's weights into them.

A form is how numbers are kept: codes, scales, minima. Backends see forms and nothing else. A scheme
says which weights of a model take which form, and how a checkpoint's tensors become it; published
checkpoints (packed words, zero points, permuted columns) are schemes that read into the same forms.
Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from octavo.core.contract import WeightSpec

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

ROWS_AT_ONCE = 4096
"""Outputs that a portable product widens to float64 at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A matrix [N, K] in a canonical form: codes · scales + minima, by row and group of inputs.

    form: its name. codes: [N, K], one code an element, unsigned where there are minima. scales: [N, K /
    group]. minima: the same shape, or None. group: inputs that share a scale. dtype: of the
    activations that come out of it.
    """

    form: str
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    group: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, ids: torch.Tensor) -> QuantizedTensor:
        """Some of its rows, in the order of ids [R]."""
        minima = None if self.minima is None else self.minima.index_select(0, ids)
        codes, scales = (t.index_select(0, ids) for t in (self.codes, self.scales))
        return QuantizedTensor(self.form, codes, scales, minima, self.group, self.dtype)

    def to(self, device: str, dtype: torch.dtype) -> QuantizedTensor:
        """The same on a device, for activations of `dtype`."""
        minima = None if self.minima is None else self.minima.to(device)
        return QuantizedTensor(
            self.form, self.codes.to(device), self.scales.to(device), minima, self.group, dtype
        )


class Form:
    """How a quantised matrix is kept, with the portable torch body of all that is done with it.

    Products quantise activations by token and group of inputs, to symmetric 8-bit codes.
    """

    name: ClassVar[str]  # the word of `Capabilities.quantization`
    bits: ClassVar[int]  # of a code
    needs: ClassVar[str]  # of a shape, in words: for the note on a weight that cannot take the form

    def holds(self, shape: Shape, group: int) -> bool:
        """Whether a matrix of this shape can be kept in groups of so many inputs (0: whole rows)."""
        raise NotImplementedError

    def nbytes(self, shape: Shape, group: int) -> int:
        """Bytes of such a matrix when nothing is padded."""
        raise NotImplementedError

    def quantize(self, weight: torch.Tensor, group: int) -> QuantizedTensor:
        """weight [N, K], any float dtype, as the nearest codes. NaN or infinity: NaN scales."""
        raise NotImplementedError

    def dequantize(self, weight: QuantizedTensor) -> torch.Tensor:
        """[N, K] float32."""
        n, k = weight.shape
        values = (
            weight.codes.float().view(n, k // weight.group, weight.group)
            * weight.scales.float()[..., None]
        )
        if weight.minima is not None:
            values = values + weight.minima.float()[..., None]
        return values.view(n, k)

    def linear(self, x: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
        """x [T, K] -> [T, N] in x's dtype: the activations as they are seen times weight, summed in float64."""
        import torch

        wide = self.seen(x, weight)
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
        for start in range(0, weight.shape[0], ROWS_AT_ONCE):
            ids = torch.arange(start, min(start + ROWS_AT_ONCE, weight.shape[0]), device=x.device)
            values = self.dequantize(weight.rows(ids)).double()
            out[:, start : start + len(ids)] = wide @ values.T
        return out.to(x.dtype)

    def seen(self, x: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
        """What a product takes of x [T, K], in float64: 8-bit codes of it."""
        return rounded_rows(x, self.shared(weight))

    def shared(self, weight: QuantizedTensor) -> int:
        """Activations of a token that share a scale."""
        return weight.group


def quantize_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> codes [T, G, group] float32, whole numbers in [-127, 127], and scales [T, G, 1].

    A last group that K does not fill is padded with zeros. scale = max |x| / 127, rounding to nearest
    even. A group with a NaN or an infinity gets codes of 0 and a NaN scale, so that its products are
    NaN; one too small for a scale gets zeros.
    """
    import torch

    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group))
    wide = padded.view(x.shape[0], padded.shape[1] // group, group)  # x may have no rows
    good = wide.isfinite().all(-1, keepdim=True)
    wide = torch.where(good, wide, 0.0)
    most = wide.abs().amax(-1, keepdim=True)
    inverse = 127.0 / most
    usable = inverse.isfinite()
    codes = torch.round(wide * torch.where(usable, inverse, 0.0))
    scales = torch.where(usable, most / 127.0, 0.0)
    return codes, torch.where(good, scales, float("nan"))


def rounded_rows(x: torch.Tensor, group: int) -> torch.Tensor:
    """What a product with quantised weights sees of x [T, K]: its codes' values, in float64."""
    codes, scales = quantize_rows(x, group)
    return (codes.double() * scales.double()).flatten(1)[:, : x.shape[1]]


class Tensors(Protocol):
    """Where a scheme reads a checkpoint's tensors."""

    def get(self, name: str) -> torch.Tensor:
        """One tensor."""

    def codes(self, name: str, form: str, group: int) -> QuantizedTensor | None:
        """The same matrix in a canonical form, when the file keeps it so."""


class Scheme:
    """Which weights are quantised, how, and from what.

    name: what `--quantization`, or a checkpoint's `quant_method`, calls it. form: the canonical form
    of most of its weights, without which a device is of no use for it. A scheme of published
    checkpoints sets `from_checkpoint` and, where its tensors are not the model's own, `tensors` and
    `read`.
    """

    name: ClassVar[str]
    form: ClassVar[str]

    @classmethod
    def from_weights(cls) -> Scheme | None:
        """The scheme for a checkpoint that is not quantised, or None when it has no use for one."""
        return None

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> Scheme | None:
        """The scheme of a checkpoint with this `quantization_config`, or None when it reads none.

        Raises:
            ConfigError: one of a kind that is not read, with the kinds that are.
        """
        return None

    def choices(self, spec: WeightSpec) -> tuple[tuple[str, int], ...]:
        """Forms that a weight may take, each with its group (0: whole rows), best first; none: it
        stays as it is."""
        raise NotImplementedError

    def tensors(self, spec: WeightSpec, name: str, shape: Shape) -> Mapping[str, Shape]:
        """The checkpoint's tensors behind part `name` of a weight, with their shapes."""
        return {name: shape}

    def read(
        self, spec: WeightSpec, name: str, shape: Shape, source: Tensors
    ) -> torch.Tensor | QuantizedTensor:
        """Part `name` of a weight: float numbers [N, K], or codes when the checkpoint has them."""
        if spec.scheme is not None:
            found = source.codes(name, spec.scheme, spec.group)
            if found is not None:
                return found
        return source.get(name)
