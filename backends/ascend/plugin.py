"""Entry point of the Ascend backend. Imports no torch and nothing of the vendor's."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.backends.ascend.backend import AscendBackend
from octavo.plugins import Backend, hookimpl


@hookimpl
def octavo_backends() -> Sequence[Backend]:
    return [AscendBackend()]
