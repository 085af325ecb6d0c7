"""Other libraries whose matrix products may stand in for the kernels' own, where they were measured to be
right and clearly faster on this machine; nothing is taken on trust, and nothing measured unasked."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.backends.cpu.backend import cpu_flags
from octavo.core.config import default_cache_dir
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


# --- the trial ---

SHAPES = ((1024, 1024), (4096, 1024), (1024, 4096))
ROWS = (1, 8, 64)
MARGIN = 0.8
"""A provider may take so much of the kernels' time at most, at each number of rows: with it goes the fused
layer, which only the kernels' own products have."""
_PASSES = 20


def verdict_file() -> Path:
    return default_cache_dir() / "cpu-providers.json"


def trial_key(provider: Provider, threads: int) -> str:
    """What a measurement holds for: the machine, the versions and the number of threads."""
    from octavo.kernels import cpu as lib

    flags = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:12]
    parts = (
        provider.package,
        provider.version(),
        "torch",
        version("torch"),
        "octavo",
        version("octavo"),
    )
    return " ".join((*parts, platform.machine(), flags, lib.isa(), f"{threads} threads"))


def read_verdicts() -> dict[str, dict[str, float]]:
    """key -> share of the kernels' time for each number of rows; empty when nothing was measured."""
    try:
        found = json.loads(verdict_file().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def measure(threads: int) -> None:
    """Times every usable provider beside the kernels on their current threads and keeps the result.

    A wrong result counts as infinitely slow. Takes some seconds a provider.
    """
    found = read_verdicts()
    for provider in PROVIDERS:
        if provider.unusable() is None:
            found[trial_key(provider, threads)] = _trial(provider.path)
    path = verdict_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(found, indent=1), "utf-8")
    scratch.replace(path)  # two starts at once: either result is whole


def _trial(path: LinearPath) -> dict[str, float]:
    import torch

    from octavo.backends.cpu.paths import error, example, own

    times = {rows: [0.0, 0.0] for rows in ROWS}
    with torch.inference_mode():
        for n, k in SHAPES:
            weight, x = example(n, k, max(ROWS))
            try:
                if error(path, weight, x) > path.tolerance:
                    return {str(rows): WRONG for rows in ROWS}
                both = (path.pack(weight), own(path.format).pack(weight))
            except (RuntimeError, ImportError, AttributeError, TypeError):
                return {str(rows): WRONG for rows in ROWS}
            for rows in ROWS:
                best = [float("inf")] * 2
                for _ in range(_PASSES):
                    for i, product in enumerate(both):
                        started = time.perf_counter()
                        product(x[:rows])
                        best[i] = min(best[i], time.perf_counter() - started)
                times[rows] = [a + b for a, b in zip(times[rows], best, strict=True)]
    return {str(rows): theirs / ours for rows, (theirs, ours) in times.items()}


WRONG = 1e9
"""Stands for a provider that fails or gives wrong results."""


def choose(threads: int) -> Provider | None:
    """The provider that was measured to be clearly faster at every number of rows, the fastest of them."""
    verdicts, best = read_verdicts(), None
    least = float("inf")
    for provider in PROVIDERS:
        if provider.unusable() is None:
            shares = verdicts.get(trial_key(provider, threads), {})
            worst = max(shares.values(), default=float("inf"))
            if worst <= MARGIN and worst < least:
                best, least = provider, worst
    return best


def status(threads: int) -> str:
    """For `octavo devices cpu`: each provider, and what a measurement said."""
    verdicts, chosen, parts = read_verdicts(), choose(threads), []
    for provider in PROVIDERS:
        reason = provider.unusable()
        if reason is None:
            shares = verdicts.get(trial_key(provider, threads))
            if shares is None:
                reason = "not measured (--op-providers measure)"
            elif max(shares.values()) >= WRONG:
                reason = "measured: fails or is wrong"
            else:
                told = ", ".join(
                    f"{1 / share:.2f} at {rows} rows" for rows, share in shares.items()
                )
                reason = f"measured: linear, times the kernels' speed: {told}"
                reason += "; used with --op-providers auto" if provider is chosen else "; not used"
        parts.append(f"{provider.name}: {reason}")
    return ". ".join(parts)
