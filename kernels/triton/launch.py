"""How large a program of an element-wise kernel is, and the torch dtypes of what kernels write."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TILE = 2048  # numbers a program should have at least, so that short rows share one


def rows_per_program(block: int) -> int:
    """Rows of `block` numbers (a power of two) that one program takes."""
    return max(1, TILE // block)


def warps_for(numbers: int) -> int:
    """Warps (wavefronts) of a program that works on so many numbers: 16 a lane where lanes are 32."""
    return min(16, max(1, numbers // 512))


def codes_dtype(kind: str) -> torch.dtype:
    """The torch dtype of a form of `numbers.CODES`, of its "scale", or of the "bits" of an fp8 form.

    Raises KeyError for another name.
    """
    import torch

    return {
        "int8": torch.int8,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
        "scale": torch.float32,
        "bits": torch.uint8,
    }[kind]
