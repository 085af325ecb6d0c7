"""`octavo backend new`: the package it writes installs, serves at once, and passes its own tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.core.config import ConfigError
from octavo.core.entry.cli import backend_new

GENERATE = """
import json, sys
from octavo.core.config import EngineConfig
from octavo.core.entry.wiring import build_engine
from octavo.core.params import SamplingParams
from octavo.core.types import Request

found = {}
for device in ("acme_npu", "reference"):
    engine = build_engine(EngineConfig(model=sys.argv[1], device=device, num_kv_blocks=20))
    engine.add(Request(id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams(temperature=0, max_tokens=8)))
    tokens = []
    while engine.has_unfinished():
        for update in engine.step():
            tokens += update.token_ids
    found[device] = [engine.info.backend, tokens]
print(json.dumps(found))
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, **environment},
    )


def octavo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "octavo.core.entry.cli.main", *arguments, **environment)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "octavo-acme-npu"
    done = octavo("backend", "new", "acme_npu", "--path", str(folder))
    assert done.returncode == 0, done.stderr
    assert "octavo backend check acme_npu" in done.stdout
    return folder


@pytest.fixture(scope="module")
def site(package: Path, installed: Callable[..., Path]) -> str:
    return str(installed(package))


def test_everything_has_the_name(package: Path) -> None:
    files = {str(p.relative_to(package)) for p in package.rglob("*") if p.is_file()}
    assert files == {
        ".github/workflows/check.yml",
        ".gitignore",
        "README.md",
        "octavo_acme_npu/__init__.py",
        "octavo_acme_npu/backend.py",
        "octavo_acme_npu/ops.py",
        "pyproject.toml",
        "tests/test_acme_npu.py",
    }
    for name in files:
        assert "mychip" not in (package / name).read_text("utf-8").lower(), name
    assert "class AcmeNpuBackend(Backend)" in (package / "octavo_acme_npu/backend.py").read_text()
    assert 'name = "octavo-acme-npu"' in (package / "pyproject.toml").read_text()


def test_it_serves_at_once(site: str, model: Path) -> None:
    done = run(sys.executable, "-c", GENERATE, str(model), PYTHONPATH=site)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["acme_npu"][0] == "acme_npu" and len(found["acme_npu"][1]) == 8
    assert found["acme_npu"][1] == found["reference"][1]


def test_the_kit_checks_it(site: str) -> None:
    done = octavo("backend", "check", "acme_npu", "--only", "act_and_mul", PYTHONPATH=site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "octavo-acme-npu" in done.stdout and "0 failed" in done.stdout


@pytest.mark.slow
def test_its_own_tests_pass(package: Path, site: str) -> None:
    done = run(sys.executable, "-m", "pytest", "-q", str(package / "tests"), PYTHONPATH=site)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.parametrize(
    "name", ["", "Chip", "9chip", "my-chip", "my__chip", "chip_", "a.b", "x" * 33, "é"]
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a backend: use small letters"):
        backend_new.checked_name(name)


@pytest.mark.parametrize(("name", "why"), [("cpu", "taken by backend 'cpu'"), ("auto", "--device")])
def test_what_is_taken_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        backend_new.checked_name(name)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="exists already: choose another with --path"):
        backend_new.write("chip", tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        backend_new.write("chip", tmp_path / "mine")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(ConfigError, match="cannot be written"):
        backend_new.write("chip", tmp_path / "mine" / "below")
