"""`octavo bench speculation` on a tiny model whose tokens are bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_model import byte_llama

from octavo.core.entry.bench.speculation import TASKS, Point, crossover
from octavo.core.entry.cli.main import main


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "s.json"
    config = byte_llama(tmp_path / "model") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 640}))
    main(
        [
            *f"bench speculation {config.parent} --device cpu --dtype float32".split(),
            *["--streams", "1,3", "--output-len", "24", "--repeats", "1", "--markdown"],
            *("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1, "adaptive": false}'),
            *("--json", str(path), "--plot", str(tmp_path / "figures")),
        ]
    )  # fmt: skip
    text = capsys.readouterr().out
    found = json.loads(path.read_text())
    assert [(p["task"], p["streams"]) for p in found["points"]] == [
        (task, streams) for task in TASKS for streams in (1, 3)
    ]
    for point in found["points"]:
        assert point["same"] and point["drafted"] >= point["accepted"] and point["plain"] > 0
        assert point["speedup"] == pytest.approx(point["drafting"] / point["plain"])  # of one round
        assert point["apart"] >= 0
        assert point["length"] == pytest.approx(1 + point["accepted"] / point["drafts"])
    assert sum(point["accepted"] for point in found["points"]) > 0
    assert found["config"]["speculative_config"]["adaptive"] is False
    assert text.count("| yes") == 8
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {
        "speculation.png",
        "speculation.svg",
    }


def test_where_drafts_no_longer_pay() -> None:
    def points(*speedups: float) -> list[Point]:
        return [
            Point("quote", 2**i, 100, 100 * s, s, 0, 1, 1, 1, True) for i, s in enumerate(speedups)
        ]

    assert crossover(points(2, 1.5, 1.0, 0.99), "quote") == 4
    assert crossover(points(2, 1.0, 1.2, 1.0), "quote") == 8
    assert crossover(points(2, 1.5), "quote") is None
    assert crossover(points(1.0, 1.0), "quote") == 1
