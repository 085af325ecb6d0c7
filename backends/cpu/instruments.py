"""What `octavo bench` measures a CPU with."""

from __future__ import annotations

import torch

from octavo.backends.cpu import paths
from octavo.kernels import cpu as lib
from octavo.kernels.cpu import measure
from octavo.plugins import LinearPath, Peaks

READ_BYTES = 512 << 20
"""A buffer that no cache holds."""


class CpuInstruments:
    """The library's own counters and peaks, and torch's products beside its own."""

    def peaks(self) -> Peaks:
        buffer = torch.ones(READ_BYTES, dtype=torch.uint8)
        return Peaks(
            float32=measure.peak("float32"),
            int8=measure.peak("int8"),
            read_bytes=measure.read_bandwidth(buffer),
        )

    def variants(self) -> list[str]:
        return lib.isas()

    def use_variant(self, name: str) -> None:
        lib.force_isa(name)

    def start_phases(self) -> None:
        measure.start_phases()

    def read_phases(self) -> dict[str, float]:
        return measure.read_phases()

    def stop_phases(self) -> None:
        measure.stop_phases()

    def linear_paths(self) -> tuple[list[LinearPath], dict[str, str]]:
        return paths.linear_paths()
