"""Kernels in Triton's interpreter. It is chosen when triton is imported, which other packages do too: so here,
before any of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from octavo.kernels.triton.runtime import interpreted

if not interpreted():  # a lane that skipped its kernels must not pass
    raise RuntimeError(
        "triton was imported for compiling before this lane's tests could ask otherwise"
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The interpreter's products are small: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
