"""Finding GPUs by looking at files, and what the user is told when something is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.backends.triton import backend as module
from octavo.backends.triton import found
from octavo.backends.triton.backend import TritonBackend


def test_nvidia_gpus_and_their_models(tmp_path: Path) -> None:
    assert found.nvidia_gpus(tmp_path) == {}
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    for i, model in enumerate(["NVIDIA H200", "NVIDIA H200"]):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{i}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\n")
    gpus = found.nvidia_gpus(tmp_path)
    assert list(gpus) == ["nvidia0", "nvidia2", "nvidia10"]
    assert list(gpus.values()) == ["NVIDIA H200", "NVIDIA H200", ""]


def test_amd_gpus_and_their_archs(tmp_path: Path) -> None:
    assert found.amd_gpus(tmp_path) == {}
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    for node, version in (("0", 0), ("1", 90402), ("2", 90010), ("3", 110000)):
        folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / node
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"simd_count 4\ngfx_target_version {version}\n")
    assert found.amd_gpus(tmp_path) == {"1": "gfx942", "2": "gfx90a", "3": "gfx1100"}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(found, "nvidia_gpus", lambda: {"nvidia0": "NVIDIA H200"})
    monkeypatch.setattr(found, "amd_gpus", lambda: {})
    monkeypatch.setattr(found, "find_spec", lambda name: object())
    return monkeypatch


def test_a_device_is_offered_when_all_is_there(one_gpu: pytest.MonkeyPatch) -> None:
    one_gpu.setattr(found, "torch_build", lambda: "cuda 13.0")
    probe = TritonBackend("cuda").probe()
    assert probe.devices == ("cuda:0",) and probe.details["gpus"] == "NVIDIA H200"
    assert TritonBackend("rocm").probe().devices == ()


@pytest.mark.parametrize(
    ("built", "words"),
    [
        ("", "torch is not installed"),
        ("cpu", "built for cpu.*NVIDIA"),
        ("hip 7.0", "built for hip 7.0"),
    ],
)
def test_what_is_missing_is_named(one_gpu: pytest.MonkeyPatch, built: str, words: str) -> None:
    one_gpu.setattr(found, "torch_build", lambda: built)
    probe = TritonBackend("cuda").probe()
    assert probe.devices == ()
    assert re.search(words, probe.reason)


def test_triton_missing(one_gpu: pytest.MonkeyPatch) -> None:
    one_gpu.setattr(found, "torch_build", lambda: "cuda 13.0")
    one_gpu.setattr(found, "find_spec", lambda name: None)
    one_gpu.setattr(module, "find_spec", lambda name: None)
    for word in ("cuda", "cuda:interpret"):
        assert "pip install 'octavo[triton]'" in TritonBackend(word).probe().reason


def test_how_torch_was_built_is_read_and_not_imported() -> None:
    code = (
        "import sys; from octavo.backends.triton import found, plugin\n"
        "kind = found.torch_build()\n"
        "for b in plugin.octavo_backends(): b.probe()\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\n"
        "print(kind)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    import torch

    built = f"cuda {torch.version.cuda}" if torch.version.cuda else "cpu"
    assert done.stdout.strip() == (f"hip {torch.version.hip}" if torch.version.hip else built)


def test_device_words() -> None:
    words = {b: TritonBackend(b) for b in ("cuda", "rocm", "cuda:interpret")}
    assert words["cuda"].torch_device("cuda") == "cuda:0"
    assert words["rocm"].torch_device("rocm:3") == "cuda:3"
    assert words["cuda:interpret"].torch_device("cuda:interpret") == "cpu"
    assert words["cuda"].priority > 10 and words["cuda:interpret"].priority < 0
