"""What a kernel file offers to be compiled ahead of time: `AOT: list[Variant]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.kernels.triton.tiles import ARCHS, Tile

SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Triton's names of dtypes in signatures."""


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel.

    name: unique, such as "attention_decode bf16 d128"; fn: the `@triton.jit` function; signature: its
    runtime arguments in order, as Triton writes types ("*bf16", "i32", "fp32"); constexprs: the others.

    tile: arch -> what `tiles.tile` says for the launch; its warps and stages are compile options, and
    `tiled` names the constexprs that its fields give, as {"BLOCK_M": "block_m"}.
    for_arch: arch -> further constexprs that the launch chooses by arch.
    aligned: runtime arguments that the launch finds divisible by 16 (pointers always are).
    tensor_cores: whether matrix instructions must stand in the code; archs: where it is offered.
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    tile: Callable[[str], Tile]
    tiled: Mapping[str, str] = field(default_factory=dict)
    for_arch: Callable[[str], Mapping[str, Any]] = lambda arch: {}
    aligned: tuple[str, ...] = ()
    tensor_cores: bool = False
    archs: tuple[str, ...] = ARCHS

    def constexprs_for(self, arch: str) -> dict[str, Any]:
        """All constexprs of this variant on one arch."""
        tile = self.tile(arch)
        sizes = {name: getattr(tile, part) for name, part in self.tiled.items()}
        return {**self.constexprs, **sizes, **self.for_arch(arch)}

    def options_for(self, arch: str) -> dict[str, Any]:
        """Compile options of this variant on one arch, as the launch passes them."""
        return launch_options(self.tile(arch))


def launch_options(tile: Tile) -> dict[str, Any]:
    """What a tile says to the compiler beside sizes."""
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.waves_per_eu:
        options["waves_per_eu"] = tile.waves_per_eu
    return options
