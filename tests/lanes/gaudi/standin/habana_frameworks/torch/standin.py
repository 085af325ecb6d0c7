"""What the stand-in adds to the vendor's names: the device's library, and counts of what was called."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from collections import Counter
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import load

NAME = "octavo_standin_hpu"

SOURCE = Path(__file__).parents[2] / "device.cpp"

calls: Counter[str] = Counter()
"""How often each vendor operation ran its body, and each call of the package that is no operation."""

generation = ["Gaudi3"]
"""Which chip the stand-in says it is."""

lazy = [True]
"""Whether the stand-in says that operations are gathered until `mark_step`, as graphs need it."""


@cache
def device() -> Any:
    """The compiled device, built once for each state of its source."""
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"octavo-standin-hpu-{digest}"
    folder.mkdir(exist_ok=True)
    built = folder / f"{NAME}.so"
    if built.exists():  # the folder's name says of what; ninja would look at times
        spec = spec_from_file_location(NAME, built)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    scripts = sysconfig.get_path("scripts")  # where ninja is, whether or not a shell looks there
    os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    return load(NAME, [str(SOURCE)], extra_cflags=["-O1"], build_directory=str(folder))


def reset() -> None:
    calls.clear()
    device().reset()


def ran() -> dict[str, int]:
    """Vendor calls, and torch operations that reached the device, by name."""
    return dict(calls) | device().op_counts()
