"""What a backend may offer to `octavo bench`: how fast its device could be, where a step's time went, and
the ways there are to multiply by a weight. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    Product = Callable[[torch.Tensor], torch.Tensor]
    """x float32 [M, k] -> float32 [M, n]."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a device does at most, measured. A multiply-add is two operations."""

    float32: float  # operations a second
    int8: float  # operations a second of int8 dot products
    read_bytes: float  # bytes a second, read from memory


@dataclass(frozen=True, slots=True)
class LinearPath:
    """One way to multiply by a weight.

    name: who multiplies; format: how the weight is kept (float32, …, int4); tolerance: the largest error,
    as a share of the largest result, that the format excuses; pack: weight float32 [n, k] -> product.
    """

    name: str
    format: str
    tolerance: float
    pack: Callable[[torch.Tensor], Product]


class Instruments(Protocol):
    """Measures one device, in the process that runs its steps, after `Backend.start`."""

    def peaks(self) -> Peaks:
        """Measures the device; takes a second or two and memory beyond every cache."""
        ...

    def variants(self) -> Sequence[str]:
        """Instruction sets, or the like, that the device's own kernels can use, the best first."""
        ...

    def use_variant(self, name: str) -> None:
        """Uses one of them from now on. Raises ValueError for another."""
        ...

    def start_phases(self) -> None:
        """Sets the seconds of all phases to zero and counts until `stop_phases`."""
        ...

    def read_phases(self) -> dict[str, float]:
        """Seconds of each phase of the kernels since `start_phases`: "linear", "attention", "sampling" and
        whatever else the device tells apart."""
        ...

    def stop_phases(self) -> None:
        """Counts no more."""
        ...

    def linear_paths(self) -> tuple[list[LinearPath], dict[str, str]]:
        """The ways that work here, the device's own first; and the others by name, with the reason."""
        ...
