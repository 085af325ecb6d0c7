"""What every kernel is launched with on every chip: tile sizes, warps and pipeline stages.

The launch and the ahead-of-time compile both ask `tile`, so what is compiled and checked for
spills is what runs. Imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
ARCHS = NVIDIA + AMD
INTERPRET = "interpret"
"""Stands for Triton's interpreter on the CPU: small tiles, because a program costs milliseconds there."""


@dataclass(frozen=True, slots=True)
class Tile:
    """block_m: rows of a program's output; block_n: how many columns, keys or elements it takes at a
    time; num_stages: depth of the load pipeline; num_warps: warps (waves) of a program; waves_per_eu:
    AMD's occupancy hint, 0 for none."""

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    waves_per_eu: int = 0


def fallback_arch(arch: str) -> str:
    """The arch of `ARCHS` whose tiles an unlisted chip takes: the nearest older one of its family.

    Raises:
        ValueError: neither an NVIDIA nor an AMD arch.
    """
    if arch in ARCHS or arch == INTERPRET:
        return arch
    if arch.startswith("sm_"):
        older = [a for a in NVIDIA if int(a[3:]) <= int(arch[3:])]
        return older[-1] if older else NVIDIA[0]
    if arch.startswith("gfx"):
        for prefix, same in (("gfx12", "gfx1201"), ("gfx11", "gfx1100"), ("gfx95", "gfx950")):
            if arch.startswith(prefix):
                return same
        return "gfx942" if arch.startswith("gfx94") else "gfx90a"
    raise ValueError(f"no tiles for arch {arch!r}; known: {', '.join(ARCHS)}")


def tile(kernel: str, arch: str, head_size: int, dtype: str) -> Tile:
    """The tile of a kernel.

    Args:
        kernel: a name of `TABLES`.
        arch: "sm_80" to "gfx1201", or `INTERPRET`.
        head_size: of attention kernels the head size, of others the row's length.
        dtype: "float32", "float16" or "bfloat16", of what is computed with.

    Raises:
        ValueError: a kernel that has no table, or an arch of no known family.
    """
    if kernel not in TABLES:
        raise ValueError(f"no tiles for kernel {kernel!r}; known: {', '.join(sorted(TABLES))}")
    return TABLES[kernel](fallback_arch(arch), head_size, dtype)


RDNA = ("gfx1100", "gfx1201")
"""AMD's chips with 256 registers to a lane, and no matrix instructions for float32."""


def _attention_prefill(arch: str, head_size: int, dtype: str) -> Tile:
    if arch == INTERPRET:
        return Tile(32, 32, 1, 1)
    wide, small = head_size > 128, head_size <= 64
    if dtype == "float32":
        return _attention_float32(arch, wide)
    if arch == "sm_90":
        return Tile(128, 32, 2, 8) if wide else Tile(128, 64, 3, 8)
    if arch == "sm_100":
        return Tile(64, 32, 2, 4) if wide else Tile(128, 64, 2 if small else 3, 8)
    if arch in NVIDIA:
        if wide:
            return Tile(64, 32, 2, 8)
        return Tile(128, 64, 3, 8) if small else Tile(128, 32, 3, 8)
    if arch in RDNA:
        return Tile(32, 16, 1, 4) if wide else Tile(64, 16 if arch == "gfx1100" else 32, 1, 4)
    return Tile(64, 32, 1, 4) if wide else Tile(128, 32, 1, 4)


def _attention_float32(arch: str, wide: bool) -> Tile:
    if arch in RDNA:
        return Tile(16, 16, 1, 8)
    return Tile(16, 16 if wide else 32, 1, 4)


def widest_head(arch: str, dtype: str) -> int:
    """The largest head size that attention of `dtype` takes without spilling registers."""
    known = fallback_arch(arch)
    return 128 if known == "gfx1100" or (known in RDNA and dtype == "float32") else 256


def _attention_decode(arch: str, head_size: int, dtype: str) -> Tile:
    if arch == INTERPRET:
        return Tile(16, 32, 1, 1)
    wide = head_size > 128
    if dtype == "float32":
        return _attention_float32(arch, wide)
    if arch in ("sm_80", "sm_90", "sm_100"):
        return Tile(16, 32 if wide else 64, 3, 4)
    if arch in NVIDIA:
        return Tile(16, 32, 2 if wide else 3, 4)
    return Tile(16, 32, 1, 4 if wide or arch == "gfx1100" else 2)


def over_codes(tile: Tile, kernel: str, arch: str) -> Tile:
    """The tile of an attention kernel over a cache of 8-bit codes, `tile` being the one over plain numbers.
    Only its warps differ: the work is cut before the cache is known."""
    if fallback_arch(arch) == "gfx90a" and kernel == "attention_prefill" and tile.block_m >= 128:
        # Taking codes apart leaves too few scalar registers: with four waves two of them spill.
        return replace(tile, num_warps=8)
    return tile


def _rows(arch: str, head_size: int, dtype: str) -> Tile:
    """Kernels that stream rows: as many warps as a row has work for."""
    return Tile(1 if arch != INTERPRET else 8, 1024, 1, 4 if head_size <= 4096 else 8)


def _whole_rows(most: int, least: int = 2048) -> Callable[[str, int, str], Tile]:
    """Kernels that keep up to `most` numbers of a row in registers, and several rows when they are
    short, `least` numbers in all: 16 numbers a lane, 32 in the longest."""

    def of(arch: str, length: int, dtype: str) -> Tile:
        block = min(1 << max(0, length - 1).bit_length(), most)
        rows = max(1, least // block)
        lanes = 64 if arch.startswith("gfx9") else 32
        # With 32 numbers a lane the code for sm_120 spills where the row is quantised.
        warps = 32 if arch == "sm_120" else 16
        return Tile(rows, block, 1, min(warps, max(1, rows * block // (16 * lanes))))

    return of


def _vocabulary(arch: str, length: int, dtype: str) -> Tile:
    """Programs that each take one part of a row of logits: 8 numbers a lane are on their way."""
    return Tile(1, 2048, 1, 4 if arch.startswith("gfx9") else 8)


def _search(arch: str, length: int, dtype: str) -> Tile:
    """Programs that each search a row of logits. block_m: logits that are compared with eight keys at a
    time; block_n: with one key."""
    return Tile(1024, 4096, 1, 8 if arch.startswith("gfx9") else 16)


def _write_kv(arch: str, head_size: int, dtype: str) -> Tile:
    return Tile(16, 0, 1, 4)


def _copy(arch: str, head_size: int, dtype: str) -> Tile:
    return Tile(1, 4096 if arch == INTERPRET else 2048, 1, 4)


TABLES = {
    "attention_prefill": _attention_prefill,
    "attention_decode": _attention_decode,
    "attention_combine": _rows,
    "write_kv": _write_kv,
    "copy_blocks": _copy,
    "rms_norm": _whole_rows(16384),
    "rotary": _whole_rows(2048, least=1024),
    "activation": _whole_rows(4096),
    "sampling": _vocabulary,
    "sampling_cut": _search,
}
