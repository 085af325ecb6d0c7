"""The stand-in for Intel's package goes where imports find it, before anything asks for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make

sys.path.insert(0, str(Path(__file__).parent / "standin"))

import_module("habana_frameworks.torch")  # compiles the device, outside any test's time


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def standin() -> Iterator[Any]:
    """The stand-in's counters, at zero; its switches are put back."""
    from habana_frameworks.torch import standin

    from octavo.backends.gaudi.vendor import vendor

    standin.reset()
    yield standin
    standin.generation[0], standin.lazy[0] = "Gaudi3", True
    vendor.cache_clear()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = make("Llama", {"max_position_embeddings": 1024})
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model
