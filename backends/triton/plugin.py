"""Entry point of the Triton backend. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.backends.triton.backend import TritonBackend
from octavo.plugins import Backend, hookimpl


@hookimpl
def octavo_backends() -> Sequence[Backend]:
    return [TritonBackend(word) for word in ("cuda", "rocm", "cuda:interpret")]
