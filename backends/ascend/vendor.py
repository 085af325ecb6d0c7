"""torch-npu, imported once and only when a device is started, and what can be said of it without that."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.core.config import ConfigError

PACKAGE = "torch_npu"

CANN = "libascendcl.so"
"""The library of CANN that every program for the chip loads."""


@cache
def vendor() -> Any:
    """The module `torch_npu`, with the operations of its ATB library registered.

    Raises:
        ConfigError: it cannot be imported, as a rule because CANN is not there.
    """
    try:
        module: Any = import_module(PACKAGE)
        import torch

        library = Path(module.__file__).parent / "lib" / "libop_plugin_atb.so"
        if not hasattr(torch.ops.atb, "_npu_reshape_and_cache") and library.exists():
            operations: Any = torch.ops
            operations.load_library(str(library))
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"--device npu: importing {PACKAGE} failed: {str(error).partition(chr(10))[0]}. {HELP}"
        ) from error
    return module


HELP = (
    "Install CANN and source its set_env.sh; see docs/backends/ascend.md. Where there is no CANN, torch "
    "itself cannot be imported beside torch-npu unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set, which "
    "Octavo does for itself"
)


def why_absent() -> str | None:
    """Why no Ascend can be used here, or None. Imports nothing."""
    if find_spec(PACKAGE) is None:
        return (
            "torch-npu is not installed: pip install 'octavo[ascend]', beside CANN and the driver"
        )
    if find_spec("torch") is None:
        return "torch is not installed"
    try:
        ctypes.CDLL(CANN)
    except OSError:
        return f"torch-npu is installed without CANN ({CANN} is not found). {HELP}"
    if not device_nodes():
        return "CANN is here, but the driver shows no device (no /dev/davinci*)"
    return None


def device_nodes() -> list[str]:
    """The driver's devices."""
    return sorted(str(node) for node in Path("/dev").glob("davinci[0-9]*"))
