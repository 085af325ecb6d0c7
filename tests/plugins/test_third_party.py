"""A third party's package, installed for real and used through `--device`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOY = Path(__file__).parents[2] / "plugins" / "examples" / "octavo-toy"

GENERATE = """
import json, sys
from octavo.core.config import EngineConfig
from octavo.core.entry.wiring import build_engine
from octavo.core.params import SamplingParams
from octavo.core.types import Request
from octavo.plugins.manager import plugins

row = next(r for r in plugins().devices() if r.word == "toy")
found = {}
for device in ("toy", "reference"):
    engine = build_engine(EngineConfig(model=sys.argv[1], device=device, num_kv_blocks=20))
    engine.add(Request(id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams(temperature=0, max_tokens=8)))
    tokens = []
    while engine.has_unfinished():
        for update in engine.step():
            tokens += update.token_ids
    found[device] = [engine.info.backend, tokens]
print(json.dumps({"distribution": row.distribution, "plugin": row.plugin, **found}))
"""


@pytest.fixture(scope="module")
def site(installed: Callable[..., Path]) -> Path:
    return installed(TOY)


def run(code: str, site: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=200, check=False, env=environment,
    )  # fmt: skip


def test_a_few_lines_make_a_device(site: Path, model: Path) -> None:
    done = run(GENERATE, site, str(model))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["distribution"], found["plugin"]) == ("octavo-toy", "toy")
    assert found["toy"][0] == "toy" and len(found["toy"][1]) == 8
    assert found["toy"][1] == found["reference"][1]


def test_without_it_the_word_is_unknown() -> None:
    done = run("from octavo.core.entry.wiring import resolve_device\nresolve_device('toy')", None)
    assert done.returncode != 0
    assert "no backend takes --device 'toy'" in done.stderr


def test_the_toy_stays_small() -> None:
    source = (TOY / "octavo_toy.py").read_text()
    assert len(source.splitlines()) <= 22
