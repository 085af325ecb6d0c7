"""Entry point of the CPU backend. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.backends.cpu.backend import CpuBackend
from octavo.plugins import Backend, hookimpl


@hookimpl
def octavo_backends() -> Sequence[Backend]:
    return [CpuBackend()]
