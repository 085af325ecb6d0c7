"""torch-npu over stub libraries. Its operations get CPU bodies; the backend's tensors lie on the CPU."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = (
    "0"  # torch would import torch-npu before the stubs are there
)
sys.path.insert(0, str(Path(__file__).parent))

import stubs

stubs.load()

import bodies
import graphs
import torch
from tiny_models import make

from octavo.backends.ascend.backend import AscendBackend
from octavo.backends.ascend.vendor import vendor
from octavo.backends.reference.backend import ReferenceBackend
from octavo.core.entry import wiring
from octavo.plugins import hookimpl
from octavo.plugins.manager import Plugins

vendor()  # torch-npu and its ATB operations


class StandInAscend(AscendBackend):
    """The backend as it is, with tensors in host memory and float32 beside, to compare numbers exactly."""

    dtypes = ("bfloat16", "float32")

    def why_absent(self) -> str | None:
        return None

    def stand_in(self) -> str | None:
        return "CPU bodies behind torch-npu's own schemas; no chip was involved"

    def torch_device(self, device: str) -> str:
        return "cpu"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The device's module, answering without a driver; yields the counters, at zero."""
    module = vendor().npu
    monkeypatch.setattr(module, "set_device", lambda index: bodies.calls.update(set_device=1))
    monkeypatch.setattr(module, "get_device_name", lambda *_: "Ascend910B3")
    monkeypatch.setattr(module, "mem_get_info", lambda *_: (1 << 29, 1 << 30))
    monkeypatch.setattr(module, "NPUGraph", graphs.NPUGraph)
    monkeypatch.setattr(module, "graph", graphs.graph)
    bodies.calls.clear()
    yield bodies.calls


@pytest.fixture
def backend(npu: Any) -> StandInAscend:
    """The stand-in by itself."""
    return StandInAscend()


@pytest.fixture
def devices(npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine finds the stand-in as `npu`, and the reference."""
    plugin = types.ModuleType("ascend_standin_plugin")
    plugin.octavo_backends = hookimpl(lambda: [StandInAscend(), ReferenceBackend()])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    found = Plugins([metadata.EntryPoint("standin", plugin.__name__, "octavo")])
    monkeypatch.setattr(wiring, "plugins", lambda: found)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = make("Llama", {"max_position_embeddings": 1024, "head_dim": 16})
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model
