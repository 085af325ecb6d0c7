"""What a compiled Triton kernel takes of a chip: registers, spills, shared memory, occupancy.

Limits are those of NVIDIA's CUDA programming guide (compute capabilities) and of AMD's ISA and tuning
guides. Nothing here needs a GPU: numbers are read from the binary (NVIDIA) or the assembly (AMD).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KIB = 1024


@dataclass(frozen=True, slots=True)
class Chip:
    """One unit that programs share: a multiprocessor (NVIDIA), a compute unit (AMD gfx9) or a
    work-group processor (AMD gfx11, gfx12).

    lanes: of a warp or wave. shared: bytes one program may have; shared_unit: bytes of the unit, of which
    each program takes `reserved` more. registers: of one of `simds` SIMDs for each lane slot of a wave
    (AMD) or of the whole unit (NVIDIA), handed out in steps of `step`. warps: most at a time.
    """

    backend: str
    arch: int | str
    lanes: int
    shared: int
    shared_unit: int
    registers: int
    step: int
    warps: int
    programs: int
    reserved: int = 0
    simds: int = 4


def _nvidia(arch: int, shared: int, unit: int, warps: int, programs: int) -> Chip:
    sizes = (shared * KIB, unit * KIB)
    return Chip("cuda", arch, 32, *sizes, 65536, 256, warps, programs, reserved=KIB)


CHIPS: Mapping[str, Chip] = {
    "sm_80": _nvidia(80, 163, 164, 64, 32),
    "sm_86": _nvidia(86, 99, 100, 48, 16),
    "sm_89": _nvidia(89, 99, 100, 48, 24),
    "sm_90": _nvidia(90, 227, 228, 64, 32),
    "sm_100": _nvidia(100, 227, 228, 64, 32),
    "sm_120": _nvidia(120, 99, 100, 48, 24),
    "gfx90a": Chip("hip", "gfx90a", 64, 64 * KIB, 64 * KIB, 512, 8, 32, 32),
    "gfx942": Chip("hip", "gfx942", 64, 64 * KIB, 64 * KIB, 512, 8, 32, 32),
    "gfx950": Chip("hip", "gfx950", 64, 160 * KIB, 160 * KIB, 512, 8, 32, 32),
    "gfx1100": Chip("hip", "gfx1100", 32, 64 * KIB, 128 * KIB, 1536, 24, 64, 32),
    "gfx1201": Chip("hip", "gfx1201", 32, 64 * KIB, 128 * KIB, 1536, 24, 64, 32),
}

# Instructions that multiply matrices, by what a reader of the page calls them.
MATRIX = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma": r"\bmma\.sync",
    "mfma": r"\bv_mfma_",
    "wmma": r"\bv_s?wmma",
}


@dataclass(frozen=True, slots=True)
class Use:
    """What one kernel takes. registers: a thread's (NVIDIA), a lane's vector registers (AMD); scalars:
    a wave's scalar registers (AMD); spills: registers kept in memory, or bytes of stack (NVIDIA);
    shared: bytes; matrix: kind and number of matrix instructions; occupancy: warps of most warps."""

    registers: int
    scalars: int
    spills: int
    shared: int
    matrix: str
    occupancy: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def target(arch: str) -> Any:
    """Triton's name of an architecture of `CHIPS`."""
    from triton.backends.compiler import GPUTarget

    chip = CHIPS[arch]
    return GPUTarget(chip.backend, chip.arch, chip.lanes)


def occupancy(chip: Chip, registers: int, shared: int, warps: int) -> float:
    """Which share of the warps a unit can hold are there when it runs programs like this only."""
    programs = min(chip.programs, chip.warps // warps)
    if shared:
        programs = min(programs, chip.shared_unit // (shared + chip.reserved))
    if chip.backend == "cuda":
        of_warp = -(-registers * chip.lanes // chip.step) * chip.step
        # Warps of a unit are handed out to four schedulers evenly.
        of_unit = chip.registers // max(of_warp, 1) // 4 * 4
    else:
        of_lane = -(-max(registers, 1) // chip.step) * chip.step
        of_unit = min(chip.registers // of_lane, chip.warps // chip.simds) * chip.simds
    programs = min(programs, of_unit // warps)
    return round(programs * warps / chip.warps, 4)


def _matrix(text: str) -> str:
    counts = {name: len(re.findall(pattern, text)) for name, pattern in MATRIX.items()}
    return " ".join(f"{name} {count}" for name, count in counts.items() if count)


def _nvidia_use(binary: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def use_of(kernel: Any, arch: str) -> Use:
    """What a kernel compiled for `arch` takes.

    Raises KeyError when the binary does not say.
    """
    chip, asm, warps = CHIPS[arch], kernel.asm, kernel.metadata.num_warps
    shared = int(kernel.metadata.shared)
    if chip.backend == "cuda":
        found = _nvidia_use(asm["cubin"])
        registers, scalars = found["REG"], 0
        spills = found["STACK"] + found["LOCAL"]
        matrix = _matrix(asm["ptx"])
    else:
        text = asm["amdgcn"]
        found = {
            name: int(n)
            for name, n in re.findall(r"^\s*(?:- )?\.([a-z_]+):\s*(\d+)\s*$", text, re.MULTILINE)
        }
        # Where both kinds share one file, `vgpr_count` is of both.
        registers, scalars = found["vgpr_count"], found["sgpr_count"]
        spills = max(
            found["vgpr_spill_count"],
            found["sgpr_spill_count"],
            found["private_segment_fixed_size"],
        )
        matrix = _matrix(text)
    share = occupancy(chip, registers, shared, warps)
    return Use(registers, scalars, spills, shared, matrix, share)
