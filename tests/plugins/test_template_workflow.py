"""The workflow of a new backend's package: what its runner types, typed where Octavo is not installed yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from installed import builds_wheels

from octavo.core.entry.cli import backend_new

ROOT = Path(__file__).parents[2]
GIT = "https://git.example.org/octavo.git"


def jobs_of(package: Path) -> tuple[str, dict[str, Any]]:
    """The requirement that the workflow installs Octavo by, and its job."""
    found = yaml.safe_load((package / ".github/workflows/check.yml").read_text("utf-8"))
    return found["env"]["OCTAVO"], found["jobs"]["check"]


def git(revision: str | None = None, **more: str) -> str:
    info = {"vcs": "git", "commit_id": "3f2a" * 10}
    if revision:
        info["requested_revision"] = revision
    return json.dumps({"url": GIT, "vcs_info": info, **more})


@pytest.mark.parametrize(
    ("direct_url", "requirement"),
    [
        (None, "octavo"),
        (git(), f"octavo @ git+{GIT}"),
        (git("v0.1"), f"octavo @ git+{GIT}@v0.1"),
        (git("v0.1", subdirectory="engine"), f"octavo @ git+{GIT}@v0.1#subdirectory=engine"),
        (
            '{"url": "https://example.org/octavo-0.1.0-py3-none-any.whl", "archive_info": {}}',
            "octavo @ https://example.org/octavo-0.1.0-py3-none-any.whl",
        ),
        ('{"url": "file:///home/me/octavo", "dir_info": {"editable": true}}', "octavo"),
        ('{"url": "file:///home/me/octavo", "vcs_info": {"vcs": "git"}}', "octavo"),
    ],
)
def test_it_takes_octavo_from_where_this_one_came(
    direct_url: str | None, requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backend_new.where_from(direct_url) == requirement
    monkeypatch.setattr(backend_new, "_direct_url", lambda: direct_url)
    backend_new.write("chip", tmp_path / "package")
    assert jobs_of(tmp_path / "package")[0] == requirement


def all_but_octavo(home: Path) -> dict[str, str]:
    """An environment with every package of this one but Octavo; its variables."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    places = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", vars=places, scheme="venv"))
    for folder in [Path(p) for p in sys.path if p.endswith("site-packages")]:
        for entry in folder.iterdir():
            # What a .pth file adds to the path is on it already; Octavo may be such an addition.
            if "octavo" in entry.name or entry.suffix == ".pth" or entry.name == "__pycache__":
                continue
            if not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    for name in ("pip", "pytest"):
        script = home / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {home}/bin/python -m {name} "$@"\n')
        script.chmod(0o755)
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if builds_wheels():
        environment |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    return environment


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_its_steps_run_on_a_bare_machine(tmp_path: Path) -> None:
    """Octavo comes from an index: a folder with its wheel, the portable one, which is built in seconds."""
    package, wheels = tmp_path / "octavo-chip", tmp_path / "wheels"
    backend_new.write("chip", package)
    requirement, job = jobs_of(package)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(wheels)]
    no_compiler = {**os.environ, "CXX": "/bin/false", "CC": "/bin/false"}
    subprocess.run([*pip, str(ROOT)], check=True, env=no_compiler, cwd=tmp_path)
    environment = all_but_octavo(tmp_path / "venv")
    environment |= {"PIP_FIND_LINKS": str(wheels), "OCTAVO": requirement}
    python = str(tmp_path / "venv/bin/python")
    asked = [python, "-P", "-c", "import octavo; print(octavo.__file__)"]
    assert subprocess.run(asked, capture_output=True, check=False, cwd=tmp_path).returncode != 0
    commands = [step["run"] for step in job["steps"] if "run" in step]
    for command in commands:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", command],  # as GitHub's runner calls it
            cwd=package,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert len(commands) == 3
    used = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert Path(used).is_relative_to(tmp_path / "venv"), used
    kept = next(s["with"]["path"] for s in job["steps"] if "upload-artifact" in s.get("uses", ""))
    scorecards = {path.name for path in package.glob(kept)}
    assert scorecards == {"scorecard.json", "scorecard.html"}
    card = json.loads((package / "scorecard.json").read_text("utf-8"))
    assert card, "an empty scorecard"
