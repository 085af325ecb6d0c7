"""The strict chip over the whole engine: `pytest tests/lanes/strict`. It is installed as a package of its own."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import install
from tiny_models import make

from octavo.plugins.manager import plugins

CALLED = ("forward", "sample", "write_kv", "paged_attention", "linear")
"""What every engine on the chip runs: a lane that went past it has tested nothing."""


@pytest.fixture(scope="session", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    site = install("octavo-strict", tmp_path_factory.mktemp("strict"))
    sys.path.insert(0, str(site))
    plugins.cache_clear()
    import octavo_strict

    assert Path(octavo_strict.__file__).is_relative_to(site)
    yield site
    sys.path.remove(str(site))
    plugins.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small are done before a second thread has woken."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def chip(installed: Path) -> Iterator[Any]:
    """The chip. Fails the test that did not run on it."""
    from octavo_strict.chip import CHIP

    before = Counter(CHIP.counts)
    yield CHIP
    CHIP.fail_after(None)
    idle = [name for name in CALLED if CHIP.counts[name] == before[name]]
    assert not idle, f"the strict chip's {', '.join(idle)} were not called"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make("Llama", {"max_position_embeddings": 1024}).save_pretrained(folder)
    return folder


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the chip did, and how many ties went another way than the reference's."""
    module = sys.modules.get("octavo_strict.chip")
    if module is None:
        return
    counts = dict(sorted(module.CHIP.counts.items()))
    compared = sys.modules.get("rounded_reference")
    ties = f"; {compared.TALLY}" if compared else ""
    terminalreporter.write_line(f"the strict chip ran {counts}{ties}")
