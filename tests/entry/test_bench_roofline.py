"""`octavo bench roofline`: counting held against sums done by hand, and the command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import BASE, make

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.contract import KVSpec, ModelShape, WeightSpec
from octavo.core.entry.bench import roofline
from octavo.core.entry.bench.counting import PHASES, Chunk, Work, bytes_per_weight, step_work
from octavo.core.entry.bench.steps import by_phase
from octavo.core.entry.cli.main import main
from octavo.core.entry.wiring import resolve_model
from octavo.core.instruments import Peaks

HIDDEN, INNER, LAYERS, VOCAB = 32, 52, 3, 101  # tiny_models.BASE: 4 query heads, 2 KV heads of 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make("Llama", {}).save_pretrained(path)
    return path


def described(folder: Path, **options: Any) -> tuple[list[WeightSpec], ModelShape, str]:
    config = EngineConfig(model=str(folder), device="cpu", **options)
    specs, made = roofline.described(config, resolve_model(config))
    return specs, made.shape, made.dtype


def test_the_tiny_model_is_the_one_counted_by_hand() -> None:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    assert tuple(BASE[name] for name in names) == (HIDDEN, INNER, LAYERS, VOCAB)


def test_a_decode_step_by_hand(folder: Path) -> None:
    """Two sequences with 10 and 20 tokens, float32."""
    work = step_work(*described(folder, dtype="float32"), [Chunk(1, 10), Chunk(1, 20)])
    assert tuple(work) == PHASES
    layer = (32 + 16 + 16) * 32 + 32 * 32 + 2 * 52 * 32 + 32 * 52
    weights = 3 * layer + 101 * 32
    assert work["linear"] == Work(float32=2 * 2 * weights, bytes=4 * (weights + 2 * 101))
    # Scores and mixture: 8 + 8 multiply-adds for each of 4 heads and each position.
    assert work["attention"].float32 == 3 * 30 * 4 * 2 * (8 + 8)
    assert work["attention"].bytes == 3 * 30 * 2 * (8 + 8) * 4
    norms = 4 * 2 * (2 * 3 + 1) * 32
    rotary, activation = 3 * 2 * 3 * (4 + 2) * 8, 6 * 2 * 3 * 52
    assert work["elementwise"].float32 == norms + rotary + activation
    assert work["elementwise"].bytes == 2 * 32 * 4 + 3 * 2 * 2 * (8 + 8) * 4
    assert work["sampling"] == Work(float32=2 * 101, bytes=2 * 101 * 4)
    assert work["host"] == Work()


def test_a_prompt_by_hand(folder: Path) -> None:
    """A chunk of 5 tokens after 3: each sees itself and all before; only the last one's logits are made."""
    work = step_work(*described(folder, dtype="float16"), [Chunk(5, 8)])
    layer = (32 + 16 + 16) * 32 + 32 * 32 + 2 * 52 * 32 + 32 * 52
    assert work["linear"].float32 == 2 * (5 * 3 * layer + 101 * 32)
    assert work["linear"].bytes == 2 * (3 * layer + 101 * 32) + 4 * 101
    assert work["attention"].float32 == 3 * (4 + 5 + 6 + 7 + 8) * 4 * 2 * 16
    assert work["attention"].bytes == 3 * 8 * 2 * 16 * 2  # read once, float16


@pytest.mark.parametrize(
    ("window", "seen", "held"), [(0, 30, 8), (4, 20, 8), (2, 10, 6), (20, 30, 8)]
)
def test_windows(window: int, seen: int, held: int) -> None:
    chunk = Chunk(5, 8)
    assert chunk.visible(window) == seen == sum(min(window or 9, i) for i in range(4, 9))
    assert chunk.held(window) == held


def test_quantised_weights_are_counted_as_such() -> None:
    spec = WeightSpec("w", "linear", (("w", (64, 32)),), scheme="int4")
    shape = ModelShape("Any", 1, 32, 4, 2, 8, 100, 64, 0, (KVSpec((0,), 2, 8, 8, "float32"),))
    work = step_work([spec], shape, "float32", [Chunk(3, 3)])
    assert work["linear"] == Work(int8=2 * 3 * 64 * 32, bytes=64 * 32 * (0.5 + 4 / 32))
    without = step_work([], shape, "float32", [Chunk(3, 3)])["elementwise"]
    assert work["elementwise"].float32 - without.float32 == 3 * 3 * 32
    assert [bytes_per_weight(f) for f in ("float32", "bfloat16", "int8")] == [4, 2, 1]
    with pytest.raises(ValueError, match="fp3"):
        bytes_per_weight("fp3")


def test_the_floor_is_what_takes_longer() -> None:
    peaks = Peaks(float32=100.0, int8=400.0, read_bytes=10.0)
    assert Work(float32=200, bytes=5).seconds(peaks) == 2
    assert Work(float32=200, int8=400, bytes=5).seconds(peaks) == 3
    assert Work(float32=200, bytes=50).seconds(peaks) == 5


def test_phases_add_up_to_the_step() -> None:
    found = by_phase({"linear": 0.5, "norm": 0.1, "embedding": 0.05, "sampling": 0.1}, 1.0)
    assert found == pytest.approx(
        {"linear": 0.5, "attention": 0, "elementwise": 0.15, "sampling": 0.1, "host": 0.25}
    )


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    words = f"bench roofline {folder} --device cpu --dtype float32 --prefill 40 --batch 1,3 --context 30"
    main([*words.split(), "--repeats", "3", "--json", str(path), "--markdown"])
    text = capsys.readouterr().out
    assert "| step | phase | floor ms | measured ms | gap | of step |" in text
    assert "GFLOP/s float32" in text and "decode 3 x 30" in text
    record = json.loads(path.read_text())
    assert min(record["peaks"].values()) > 0 and record["weights"] == "float32"
    assert {"machine", "config", "engine", "disturbed", "format"} <= set(record)
    prefill, one, three = record["cases"]
    assert (prefill["sequences"], prefill["tokens"], prefill["context"]) == (1, 40, 40)
    assert (one["sequences"], three["sequences"], three["tokens"]) == (1, 3, 3)
    assert 25 <= one["context"] <= 35 and 25 <= three["context"] <= 35
    for case in record["cases"]:
        phases = case["phases"]
        assert list(phases) == [*PHASES, "total"]
        parts = [phases[name]["seconds"] for name in PHASES]
        assert sum(parts) == pytest.approx(phases["total"]["seconds"]) and min(parts) > 0
        floors = [phases[name]["floor_seconds"] for name in PHASES]
        assert sum(floors) == pytest.approx(phases["total"]["floor_seconds"])
        assert phases["host"]["floor_seconds"] == 0 < phases["linear"]["float32"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device cpu --context 4000", "--max-model-len|tokens"),
        (
            "--device cpu --prefill 100 --max-num-batched-tokens 64",
            "use --max-num-batched-tokens 100",
        ),
        ("--device reference", "no instruments"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    folder: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "roofline", str(folder), "--batch", "1", *words.split()]
    with pytest.raises(SystemExit):
        main(arguments)
    import re

    assert re.search(message, capsys.readouterr().err)


def test_config_errors_name_what_is_missing(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        roofline.instruments_of(EngineConfig(model=str(folder), device="reference"))
