"""The module that becomes `torch.hpu`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from habana_frameworks.torch import operations  # noqa: F401  # registers torch.ops.hpu
from habana_frameworks.torch.hpu.graphs import HPUGraph, graph
from habana_frameworks.torch.standin import calls, device, generation

__all__ = ["HPUGraph", "Stream", "graph"]

TOTAL_BYTES = 1 << 30

device()
torch._register_device_module("hpu", sys.modules[__name__])


class Stream:
    def synchronize(self) -> None: ...


@contextmanager
def stream(which: Stream | None) -> Iterator[None]:
    yield


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None: ...


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(index: Any) -> None:
    calls["set_device"] += 1


def synchronize(index: Any = None) -> None:
    calls["synchronize"] += 1


def get_device_name(index: Any = None) -> str:
    return f"{generation[0].upper()} (stand-in)"


def mem_get_info(index: Any = None) -> tuple[int, int]:
    """(free, total) bytes."""
    return TOTAL_BYTES - device().bytes_in_use(), TOTAL_BYTES


def manual_seed_all(seed: int) -> None: ...
