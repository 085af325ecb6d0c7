"""The parts of the engine lanes under qemu that need no qemu."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "ci"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"ci/{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "ci"))


tiny = load("tiny_engine")
qemu = load("qemu_engine")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.make(folder)
    return folder


@pytest.mark.parametrize("name", tiny.MODELS)
def test_the_tiny_models_tell_wrong_tokens_from_right_ones(name: str, models: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        options = tiny.FORMATS["float32"]
        tokens = tiny.tokens_of(models / name, "reference", options)
        assert tiny.tokens_of(models / name, "cpu", options) == tokens
    finally:
        torch.set_num_threads(before)
    assert len(tokens) == 7 and all(len(sample) == 24 for sample in tokens)
    assert len({tuple(sample) for sample in tokens}) == 6  # two samples of one are the same
    assert len({token for sample in tokens for token in sample}) > 20


def test_each_format_has_its_judge() -> None:
    here = {f"{d} / {f} / m": [[1, 2]] for d in ("reference", "cpu") for f in ("float32", "int8")}
    here["cpu / int8 / m"] = [[1, 3]]
    assert qemu.differences(here, here) == []
    for name in here:
        faults = qemu.differences(here, {**here, name: [[9]]})
        judge = "reference / float32 / m" if "float32" in name else name
        assert len(faults) == 1 and faults[0].startswith(f"{name}: ") and judge in faults[0]


def test_what_runs_under_qemu_is_this_tree(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(b"machine code")
    qemu.lay_out(tmp_path / "engine", library)
    package = tmp_path / "engine/octavo"
    assert (package / "core/engine.py").read_bytes() == (ROOT / "core/engine.py").read_bytes()
    assert (package / "kernels/cpu/liboctavo_cpu.so").read_bytes() == b"machine code"
    assert not list(package.rglob("csrc"))
    (points,) = (tmp_path / "engine").glob("octavo-*.dist-info/entry_points.txt")
    assert "cpu = octavo.backends.cpu.plugin\n" in points.read_text("utf-8")


def test_the_pinned_packages_are_those_of_the_project_where_it_pins_them() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()[1:]
    )
    pins = {name.lower(): version for name, version in pins.items()}
    for line in qemu.WHEELS.read_text("utf-8").splitlines():
        name, _, version = line.partition("==")
        if name != "torch" and name in pins:  # the newest torch for ARM with a wheel for CPUs alone
            assert version == pins[name], name
