"""Starts that find packed weights and starts that make them: the same bits, whatever lies on the disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.backends.cpu.ops import CpuOps
from octavo.core.contract import WeightSpec
from octavo.core.engine import Engine
from octavo.core.loading.files import ModelFiles
from octavo.core.loading.packed_file import PackedFile
from octavo.core.loading.weights import open_weights
from octavo.kernels import cpu as lib
from tests.fakes.tiny_models import engine, greedy, make, prompt_of, run

pytestmark = pytest.mark.skipif(not lib.available(), reason="the kernels are not built")

KINDS = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "untied with biases": ("Qwen2", {}),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make("Llama", {}).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def start(folder: Path, **options: Any) -> Engine:
    """An engine on the kernels, whose packed weights are kept under the model's parent."""
    values = {"packed_cache": True, "cache_dir": str(folder.parent / "cache"), "device": "cpu"}
    made = engine(folder, **{**values, **options})
    for thread in threading.enumerate():
        if thread.name == "octavo-packed-weights":
            thread.join()
    return made


def bits(made: Engine) -> list[Any]:
    """Tokens and log-probabilities, which are equal only if every logit is."""
    request = greedy("a", prompt_of(20), 8, logprobs=3, prompt_logprobs=3)
    updates = run(made, request)["a"]
    return [(u.token_ids, u.logprobs, u.prompt_logprobs) for u in updates]


def packed_files(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache").rglob("*.packed"))


def notes(made: Engine) -> str:
    return " ".join(note for note in made.info.notes if "packed weights" in note)


def overwrite_weights(folder: Path) -> None:
    """Other numbers behind the same size and time, which nobody can tell without reading."""
    path = folder / "model.safetensors"
    status = path.stat()
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    path.write_bytes(path.read_bytes()[:header] + bytes(status.st_size - header))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_next_start_computes_the_same_and_reads_no_original(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    folder = tmp_path / "model"
    make(*KINDS[kind]).save_pretrained(folder)
    expected = bits(start(folder, dtype=dtype, packed_cache=False))
    assert packed_files(folder) == []
    first = start(folder, dtype=dtype)
    assert bits(first) == expected and "are kept for the next start in" in notes(first)
    [path] = packed_files(folder)
    assert path.name.startswith(f"{dtype}-")
    overwrite_weights(folder)
    second = start(folder, dtype=dtype)
    assert bits(second) == expected and notes(second) == ""
    assert bits(start(folder, dtype=dtype, packed_cache=False)) != expected


def test_ways_to_pack_lie_side_by_side(folder: Path) -> None:
    start(folder, dtype="float32")
    start(folder, dtype="float16")
    assert [path.name.partition("-")[0] for path in packed_files(folder)] == ["float16", "float32"]


def test_other_weights_make_a_file_stale(folder: Path) -> None:
    old = bits(start(folder))
    model = make("Llama", {})
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    model.save_pretrained(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))  # whatever the clock's resolution is
    changed = start(folder)
    assert "made from another checkpoint" in notes(changed)
    expected = bits(start(folder, packed_cache=False))
    assert bits(changed) == expected != old
    assert len(packed_files(folder)) == 1
    again = start(folder)
    assert bits(again) == expected and notes(again) == ""


@pytest.mark.parametrize("damage", ["cut", "zeroed", "of other weights"])
def test_a_damaged_file_is_not_used_and_written_again(folder: Path, damage: str) -> None:
    expected = bits(start(folder))
    [path] = packed_files(folder)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5000])
    elif damage == "zeroed":
        path.write_bytes(path.read_bytes()[:8192] + bytes(path.stat().st_size - 8192))
    else:
        kept = PackedFile(path, json.loads(header(path))["key"], "")
        data = kept.read()
        assert data is not None
        short = {name: array[:-4].copy() for name, array in data.items()}
        kept.write(short)
    broken = start(folder)
    assert bits(broken) == expected and "are not used" in notes(broken)
    again = start(folder)
    assert bits(again) == expected and notes(again) == ""


def header(path: Path) -> bytes:
    raw = path.read_bytes()
    return raw[16 : 16 + int.from_bytes(raw[8:16], "little")]


def test_a_folder_that_cannot_be_written(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder.parent / "cache").mkdir()
    (folder.parent / "cache" / "local").write_text("a file where a folder should be")
    expected = bits(start(folder, packed_cache=False))
    assert bits(start(folder)) == expected
    assert "are not kept for the next start" in caplog.text


def test_what_is_packed_in_no_time_is_not_kept_unless_asked(folder: Path) -> None:
    made = start(folder, packed_cache=None)
    assert packed_files(folder) == [] and notes(made) == ""


def test_a_backend_without_a_layout_keeps_nothing(folder: Path) -> None:
    start(folder, device="reference")
    assert packed_files(folder) == []


def test_files_of_a_model_that_is_gone_go_too(folder: Path) -> None:
    other = folder.with_name("other")
    make("Llama", {}).save_pretrained(other)
    start(other)
    [gone] = packed_files(folder)
    shutil.rmtree(other)
    start(folder)
    assert not gone.exists() and len(packed_files(folder)) == 1


START = """
import sys
from pathlib import Path
from tests.loading.test_packing import bits, engine, notes
folder = Path(sys.argv[1])
import torch
print("ready", flush=True)
sys.stdin.readline()
made = engine(folder, packed_cache=True, cache_dir=str(folder.parent / "cache"), device="cpu")
print(repr(bits(made)))
"""


@pytest.mark.slow
def test_starts_at_the_same_time(folder: Path) -> None:
    """Whoever comes first writes; nobody waits, nobody reads half a file."""
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", START, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in begun:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in begun:  # `communicate` would wait for each one's end
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=240)[0] for process in begun]
    assert [process.returncode for process in begun] == [0, 0, 0]
    expected = repr(bits(start(folder, packed_cache=False)))
    assert [output.strip() for output in outputs] == [expected] * 3
    again = start(folder)
    assert notes(again) == "" and repr(bits(again)) == expected


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("gated", [False, True])
def test_packed_bytes_are_the_weight(scheme: str | None, gated: bool) -> None:
    ops = CpuOps()
    spec = WeightSpec("w", "linear", (("a", (48, 64)), ("b", (48, 64))), scheme=scheme, gated=gated)
    dice = torch.Generator().manual_seed(1)
    parts = {name: torch.randn(48, 64, generator=dice) for name in "ab"}
    x = torch.randn(5, 64, generator=dice)
    packed = ops.pack_weight(parts, spec, "float16")
    data = ops.store_packed(packed, spec).clone()
    loaded = ops.load_packed(data, spec, "float16")
    torch.testing.assert_close(ops.linear(x, loaded), ops.linear(x, packed), rtol=0, atol=0)
    with pytest.raises(ValueError, match="bytes"):
        ops.load_packed(data[64:], spec, "float16")


def test_the_layout_is_named_by_the_instruction_set() -> None:
    names = set()
    best = lib.isa()
    try:
        for name in lib.isas():
            lib.force_isa(name)
            names.add(CpuOps().packed_key())
    finally:
        lib.force_isa(best)
    assert len(names) == len(lib.isas())


class Keeping(CpuOps):
    """Reads weights where the file is mapped, as where there are no huge pages."""

    keeps_packed = True


@pytest.mark.parametrize("ops", [Keeping(), CpuOps()], ids=["kept", "copied"])
def test_whose_memory_weights_lie_in(folder: Path, ops: CpuOps) -> None:
    """In that of a mapped file; or, where it is worth it or they must be on a memory node, in the process's
    own, and the file's goes as it is read."""
    from octavo.core.config import EngineConfig
    from octavo.core.entry import design, wiring
    from octavo.core.loading.packing import load_weights
    from octavo.core.loading.progress import SilentProgress

    start(folder)
    config = EngineConfig(model=str(folder), cache_dir=str(folder.parent / "cache"))
    files = wiring.resolve_model(config)
    made = design.design(config, files, wiring.resolve_device("cpu"), design.Phases())
    model = design.make_model(made, files, ops)
    placed = design.place_weights(made, model, design.Phases())
    mapped = load_weights(model, placed, files, ops, made.dtype, SilentProgress())
    local = load_weights(model, placed, files, ops, made.dtype, SilentProgress(), local=True)
    assert (mapped.mapped_bytes > 0) == ops.keeps_packed and local.mapped_bytes == 0
    name = "model.layers.0.mlp.down_proj.weight"
    assert mapped.weights[name].buffer.equal(local.weights[name].buffer)
    maps = Path("/proc/self/maps").read_text()
    from_file = region(maps, mapped.weights[name].buffer.data_ptr()).endswith(".packed")
    assert from_file == ops.keeps_packed
    assert not region(maps, local.weights[name].buffer.data_ptr()).endswith(".packed")


def region(maps: str, address: int) -> str:
    for line in maps.splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line
    raise AssertionError("not mapped")


def test_originals_are_let_go(tmp_path: Path) -> None:
    """What a source has read can be given back, and read again."""
    from safetensors.torch import save_file

    big = torch.arange(4 << 20, dtype=torch.float32)
    save_file({"big": big, "small": torch.ones(3)}, tmp_path / "model.safetensors")
    source = open_weights(ModelFiles("m", "folder", tmp_path, "m"))

    def resident() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("RssFile:")[1].split()[0]) << 10

    tensor = source.get("big")
    assert tensor.sum() > 0
    touched = resident()
    source.release("big")
    assert touched - resident() > big.nbytes // 2
    assert tensor.equal(big) and source.get("big").equal(big)
    source.close()
    assert tensor.equal(big)
