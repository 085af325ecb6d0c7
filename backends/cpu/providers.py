"""Other libraries whose matrix products may stand in for the kernels' own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from octavo.backends.cpu.backend import cpu_flags
from octavo.core.instruments import LinearPath

if TYPE_CHECKING:
    import torch

    from octavo.core.instruments import Product


@dataclass(frozen=True)
class Provider:
    """A library that may be installed beside torch.

    module, package: what is imported, and what it is called where packages come from; flags: what the CPU
    must have (as Linux names it); release: how many parts of torch's version its own must share.
    """

    name: str
    module: str
    package: str
    flags: frozenset[str]
    release: int
    path: LinearPath

    def unusable(self) -> str | None:
        """Why it cannot be used here, or None. Imports nothing."""
        if find_spec(self.module) is None:
            return "not installed"
        if missing := self.flags - cpu_flags():
            return f"this CPU lacks {', '.join(sorted(missing))}"
        ours, torchs = self.version().split("."), version("torch").split("+")[0].split(".")
        if ours[: self.release] != torchs[: self.release]:
            return f"{self.package} {self.version()} is not for torch {version('torch')}"
        return None

    def version(self) -> str:
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown"


def _zentorch(weight: torch.Tensor) -> Product:
    # Its cache is keyed by a weight's address and lays the weight out anew in place: off, before it loads.
    os.environ["ZENDNNL_MATMUL_WEIGHT_CACHE"] = "0"
    import torch

    import_module("zentorch")  # registers its ops
    ops = torch.ops.zentorch
    packed = ops.zentorch_weight_prepack_for_linear(weight.clone())
    return lambda x: ops.zentorch_linear_unary(x, packed, None, is_weight_prepacked=True)


def _ipex(weight: torch.Tensor) -> Product:
    import torch

    ipex: Any = import_module("intel_extension_for_pytorch")
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    made: Product = ipex.optimize(linear.eval(), dtype=torch.float32, weights_prepack=True)
    return made


PROVIDERS = (
    Provider(
        "zentorch",
        "zentorch",
        "zentorch",
        frozenset({"avx2", "fma"}),  # its int8 needs avx512_vnni and is not used
        2,
        LinearPath("zentorch", "float32", 1e-5, _zentorch),
    ),
    Provider(
        "ipex",
        "intel_extension_for_pytorch",
        "intel-extension-for-pytorch",
        frozenset({"avx2", "fma"}),
        2,
        LinearPath("ipex", "float32", 1e-5, _ipex),
    ),
)
