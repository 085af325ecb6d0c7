"""libtpu and jax read these by themselves, when they are first imported; neither takes them as arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.update(
    JAX_PLATFORMS="cpu",  # interpret on the CPU, whatever else is there
    TPU_SKIP_MDS_QUERY="1",  # libtpu would ask a cloud's metadata server which chip this is
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # no chip is held, so others may compile beside this
)
sys.path.insert(0, str(Path(__file__).parents[3] / "ci"))


@pytest.fixture(scope="session")
def compile_for() -> Iterator[Any]:
    """`tpu_compile.compile_for`, failing where a compilation hangs."""
    import tpu_compile

    compiler = tpu_compile.Compiler(limit=240)
    yield compiler
    compiler.close()
