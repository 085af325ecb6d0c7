"""Plug-ins that exist only in one test."""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from installed import builds_wheels

from octavo.plugins import hookimpl


@pytest.fixture
def point() -> Iterator[Callable[..., metadata.EntryPoint]]:
    """Makes an entry point to a module that exists only in this test."""
    made: list[str] = []

    def make(name: str, *backends: Any, **attributes: Any) -> metadata.EntryPoint:
        module = types.ModuleType(f"plugin_for_test_{name}_{len(made)}")
        if backends:
            attributes["octavo_backends"] = hookimpl(lambda: list(backends))
        for key, value in attributes.items():
            setattr(module, key, value)
        sys.modules[module.__name__] = module
        made.append(module.__name__)
        return metadata.EntryPoint(name, module.__name__, "octavo")

    yield make
    for name in made:
        del sys.modules[name]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Installs packages from their sources, as pip does, into a folder that it returns."""

    def install(*sources: Path) -> Path:
        where = tmp_path_factory.mktemp("installed")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--target", str(where / "site")]
        if builds_wheels():
            command += ["--no-build-isolation", "--no-index"]
        for source in sources:  # copied: a build writes beside its sources
            command.append(shutil.copytree(source, where / source.name))
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return where / "site"

    return install


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model."""
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
