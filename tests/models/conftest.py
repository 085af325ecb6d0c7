"""What the tests of tiny models share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products this small are done before a second thread has woken."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = make("Llama", {"max_position_embeddings": 512})
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model
