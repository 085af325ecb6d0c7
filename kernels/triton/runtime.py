"""The one way kernels are launched: on a GPU, or by Triton's interpreter on CPU tensors.

Triton decides when a kernel is decorated whether it will be compiled or interpreted, so one process
does one or the other: `interpreted()` says which.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.tiles import INTERPRET, Tile
from octavo.kernels.triton.variants import launch_options


@triton.jit
def _probe(out):
    tl.store(out, 1)


@cache
def interpreted() -> bool:
    """Whether this process interprets its kernels instead of compiling them."""
    return not isinstance(_probe, triton.runtime.JITFunction)


@cache
def _gpu_arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def arch_of(device: torch.device) -> str:
    """ "sm_90", "gfx942", … of a device that kernels run on, or `tiles.INTERPRET`."""
    if device.type != "cuda":
        return INTERPRET
    return _gpu_arch(device.index if device.index is not None else torch.cuda.current_device())


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, tile: Tile, **constexprs: Any) -> None:
    """Runs `kernel` over `grid` on the device that is current; an empty grid is no launch.

    Raises:
        RuntimeError: CPU tensors in a process that compiles its kernels.
    """
    if 0 in grid:
        return
    if not interpreted() and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu":
        raise RuntimeError(
            "Triton kernels got CPU tensors, which only the interpreter takes: use --device "
            "cuda:interpret in a process that has not imported triton yet"
        )
    kernel[grid](*args, **constexprs, **launch_options(tile))
