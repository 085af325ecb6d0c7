"""`--device strict`: a chip that forgives nothing. Importing this module imports no torch.

| file | holds |
|---|---|
| `chip.py` | what the chip knows of itself: its buckets, its clock, its counters, its errors |
| `backend.py` | the backend: capabilities, plan, what a batch is uploaded as |
| `program.py` | compiled programs: one for each shape, none after the start |
| `cache.py` | the KV cache: its layout, and what is known of every slot |
| `ops.py` | the operations |
"""

from __future__ import annotations

from octavo.plugins import Backend, hookimpl


@hookimpl
def octavo_backends() -> list[Backend]:
    """The one backend that this package brings."""
    from octavo_strict.backend import StrictBackend

    return [StrictBackend()]
