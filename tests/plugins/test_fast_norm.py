"""plugins/examples/octavo-fast-norm, installed for real: its kernel runs in the cpu backend's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "plugins" / "examples" / "octavo-fast-norm"
GENERATE = """
import json, sys
from octavo.core.config import EngineConfig
from octavo.core.entry.wiring import build_engine
from octavo.core.params import SamplingParams
from octavo.core.types import Request
from octavo_fast_norm.kernel import Norm

calls, own = [], Norm.__call__
Norm.__call__ = lambda self, x, *rest, **more: calls.append(x.shape[0]) or own(self, x, *rest, **more)
found = {}
for choice in ("auto", "none", "fast-norm"):
    calls.clear()
    config = EngineConfig(model=sys.argv[1], device="cpu", num_kv_blocks=20, ops_from=choice)
    engine = build_engine(config)
    engine.add(Request(id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams(temperature=0, max_tokens=8)))
    tokens = []
    while engine.has_unfinished():
        for update in engine.step():
            tokens += update.token_ids
    found[choice] = {
        "tokens": tokens, "calls": len(calls), "notes": engine.info.notes,
        "ops": engine.info.capabilities["ops"],
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def environment(installed: Callable[..., Path]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed(EXAMPLE))}


def octavo(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.core.entry.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment,
    )


def test_its_kernel_runs_and_gives_the_same_tokens(
    environment: dict[str, str], model: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(model)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["auto"]["tokens"] == found["none"]["tokens"] == found["fast-norm"]["tokens"]
    assert found["auto"]["calls"] == found["fast-norm"]["calls"] > 0 == found["none"]["calls"]
    assert "rms_norm: fast-norm (octavo-fast-norm 0.1.0)" in found["auto"]["notes"]
    assert found["auto"]["ops"]["rms_norm"] == "fast-norm (octavo-fast-norm 0.1.0)"
    assert "fast-norm" not in json.dumps(found["none"]["ops"])


def test_devices_says_what_runs_from_where(environment: dict[str, str]) -> None:
    shown = octavo(environment, "devices", "cpu")
    assert shown.returncode == 0, shown.stderr
    assert "rms_norm           fast-norm (octavo-fast-norm 0.1.0)" in shown.stdout
    told = json.loads(octavo(environment, "devices", "cpu", "--json", "--ops-from", "none").stdout)
    assert "fast-norm" not in json.dumps(told)


def test_choices_that_cannot_be(environment: dict[str, str], model: Path) -> None:
    for arguments, said in (
        (("--ops-from", "fast"), "did you mean 'fast-norm'?"),
        (("--ops-from", "fast-norm", "--batch-invariant"), "holds for a device's own ops"),
    ):
        done = octavo(environment, "plan", "--model", str(model), "--device", "cpu", *arguments)
        assert done.returncode == 2 and said in done.stderr, done.stderr
