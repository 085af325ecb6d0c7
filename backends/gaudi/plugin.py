"""Entry point of the Gaudi backend. Imports no torch and nothing of the vendor's."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.backends.gaudi.backend import GaudiBackend
from octavo.plugins import Backend, hookimpl


@hookimpl
def octavo_backends() -> Sequence[Backend]:
    return [GaudiBackend()]
