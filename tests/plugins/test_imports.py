"""Looking for plug-ins is cheap: no torch, and no device library, until a model is loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "triton", "jax", "torch_xla")


def loaded_after(code: str) -> list[str]:
    """Which heavy modules a fresh interpreter has loaded after `code`."""
    script = (
        f"{code}\nimport sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import octavo",
        "import octavo.plugins",
        "import octavo.plugins.hookspecs",
        "import octavo.core.contract, octavo.core.config, octavo.core.types, octavo.core.scheduler",
        "import octavo.backends.reference.plugin, octavo.backends.cpu.plugin",
        "import octavo.core.entry.wiring",
        "from octavo.plugins.manager import plugins\np = plugins()\np.devices()\np.resolve('auto')",
    ],
)
def test_no_torch(code: str) -> None:
    assert loaded_after(code) == []


def test_the_check_can_fail() -> None:
    assert loaded_after("import octavo.core.ops") == ["torch"]
