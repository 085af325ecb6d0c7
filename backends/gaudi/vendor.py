"""What is used of Intel's package, imported once and only when a device is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.core.config import ConfigError

PACKAGE = "habana_frameworks"


@dataclass(frozen=True, slots=True)
class Vendor:
    """Names of `habana_frameworks.torch`.

    gaudi3: the chip has the fused block softmax. lazy: operations are gathered until `mark_step`, which
    HPU graphs need.
    """

    hpu: Any
    mark_step: Callable[[], None]
    fused_sdpa: Callable[..., Any]
    fused_rms_norm: Callable[..., Any]
    apply_rotary: Callable[..., Any]
    rotary_modes: Any
    gaudi3: bool
    lazy: bool


@cache
def vendor() -> Vendor:
    """Imports the package, which makes `hpu` a device of torch.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        import_module("habana_frameworks.torch")
        kernels: Any = import_module("habana_frameworks.torch.hpex.kernels")
        norms: Any = import_module("habana_frameworks.torch.hpex.normalization")
        chips: Any = import_module("habana_frameworks.torch.utils.experimental")
        return Vendor(
            hpu=import_module("habana_frameworks.torch.hpu"),
            mark_step=import_module("habana_frameworks.torch.core").mark_step,
            fused_sdpa=kernels.FusedSDPA.apply,
            fused_rms_norm=norms.FusedRMSNorm.apply,
            apply_rotary=kernels.apply_rotary_pos_emb,
            rotary_modes=kernels.RotaryPosEmbeddingMode,
            gaudi3=chips._get_device_type() == chips.synDeviceType.synDeviceGaudi3,
            lazy=import_module("habana_frameworks.torch.utils.internal").is_lazy(),
        )
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"--device hpu: importing {PACKAGE} failed: {error}. It must match this torch; see "
            "docs/backends/gaudi.md"
        ) from error


def why_absent() -> str | None:
    """Why no Gaudi can be used here, or None. Imports nothing."""
    if find_spec(PACKAGE) is None:
        return (
            f"{PACKAGE} is not installed: it comes with Intel Gaudi's own torch "
            "(docs/backends/gaudi.md)"
        )
    if find_spec("torch") is None:
        return "torch is not installed"
    if stand_in() is None and not device_nodes():
        return (
            f"{PACKAGE} is installed, but the driver shows no device (no /dev/accel/accel*): "
            "load habanalabs, or give the container its devices"
        )
    return None


def stand_in() -> str | None:
    """What the package says of itself when it is a stand-in for the vendor's, or None. Imports nothing."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        note = Path(folder) / "STAND_IN"
        if note.exists():
            return note.read_text("utf-8").strip()
    return None


def device_nodes() -> list[str]:
    """The driver's devices, as its releases name them."""
    for folder, pattern in (("/dev/accel", "accel[0-9]*"), ("/dev", "hl[0-9]*")):
        if found := sorted(str(node) for node in Path(folder).glob(pattern)):
            return found
    return []
