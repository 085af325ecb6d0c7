"""A third party's package, installed for real and used through `--device`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TOY = Path(__file__).parents[2] / "plugins" / "examples" / "octavo-toy"

GENERATE = """
import json, sys
from octavo.core.config import EngineConfig
from octavo.core.entry.wiring import build_engine
from octavo.core.types import Request, SamplingParams
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
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the toy from its own source."""
    where = tmp_path_factory.mktemp("toy")
    source = where / "source"  # a build writes beside its sources
    shutil.copytree(TOY, source)
    target = where / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--target", str(target)]
    if find_spec("setuptools") is not None:  # else pip fetches it to build with
        command += ["--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    where = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(where)
    return where


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
