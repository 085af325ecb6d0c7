"""The KV cache of a layer: how it is stored, and the kernel that scatters new keys and values into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.runtime import interpreted, launch
from octavo.kernels.triton.tiles import tile

if TYPE_CHECKING:
    import torch

PLAIN, NATIVE, BITS_E4M3, BITS_FNUZ = 0, 1, 2, 3
"""How numbers are stored: as a float dtype; as an 8-bit one that the chip converts itself; as the bytes of
an 8-bit one, e4m3 or AMD's e4m3fnuz, that the kernels take apart."""


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's cache: k [blocks, block, kv_heads, D] and v [blocks, block, kv_heads, Dv].

    k_scales, v_scales [kv_heads] float32: what a stored number is to be multiplied with; only read where
    `codes` is not `PLAIN`.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor
    codes: int = PLAIN
