"""A fixture that runs a kernel test once per instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.kernels import cpu


@pytest.fixture(params=cpu.isas() if cpu.available() else ["missing"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one variant, on all of torch's threads."""
    assert cpu.available(), cpu.why_unavailable()
    before = cpu.isa()
    cpu.force_isa(request.param)
    cpu.set_threads()
    yield request.param
    cpu.force_isa(before)
