"""Entry point of the reference backend. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.backends.reference.backend import ReferenceBackend
from octavo.plugins import Backend, hookimpl


@hookimpl
def octavo_backends() -> Sequence[Backend]:
    return [ReferenceBackend()]
