"""The package as a user installs it: with a compiler, without one, and from a source distribution."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEEN = """
import json
from octavo.kernels import cpu
from octavo.plugins.manager import plugins
print(json.dumps({
    "compiled": cpu.available(),
    "words": sorted(row.word for row in plugins().devices()),
    "kernels": {row.word: row.details for row in plugins().devices()}["cpu"]["kernels"],
}))
"""


def install(target: Path, source: Path, **environment: str) -> dict[str, object]:
    """Installs into a folder of its own, as `pip install .` builds it, and asks the result what it has."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, str(source)], check=True, env=os.environ | environment, cwd=target.parent)
    # -P and an empty path: neither the checkout nor an editable install may answer.
    out = subprocess.run(
        [
            sys.executable,
            "-S",
            "-P",
            "-c",
            f"import sys; sys.path[:0] = {_paths(target)!r}\n{SEEN}",
        ],
        check=True,
        capture_output=True,
        text=True,
        cwd=target.parent,
    )
    found: dict[str, object] = json.loads(out.stdout)
    return found


def _paths(target: Path) -> list[str]:
    packages = [p for p in sys.path if p.endswith("site-packages")]
    return [str(target), *packages]


@pytest.mark.slow
def test_a_machine_without_a_compiler_gets_the_portable_engine(tmp_path: Path) -> None:
    found = install(tmp_path / "here", ROOT, CXX="/bin/false", CC="/bin/false")
    assert found["compiled"] is False
    assert str(found["kernels"]).startswith("portable:")
    assert {"cpu", "reference"} <= set(found["words"])  # type: ignore[call-overload]


@pytest.mark.slow
def test_a_machine_with_a_compiler_gets_the_kernels(tmp_path: Path) -> None:
    found = install(tmp_path / "here", ROOT)
    assert found["compiled"] is True
    assert str(found["kernels"]).startswith("c++ ")
