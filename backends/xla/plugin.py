"""Entry point of the XLA backends. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.backends.xla.backend import TpuBackend, XlaBackend
from octavo.plugins import Backend, hookimpl


@hookimpl
def octavo_backends() -> Sequence[Backend]:
    return [TpuBackend(), XlaBackend()]
