"""`octavo bench swap`: the ways that are compared, and the command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_model import byte_llama

from octavo.core.entry.bench.swap import Found, table, ways
from octavo.core.entry.cli.main import main


def test_the_ways_differ_in_what_they_are_named_for() -> None:
    plain, swap, auto, more = ways(100, 1 << 20, 50)
    assert (plain.kv_blocks, plain.swap_space) == (100, 0.0)
    assert swap.swap_space == auto.swap_space == pytest.approx(50.5 / 1024)
    assert (swap.mode, auto.mode) == ("swap", "auto")
    assert (more.kv_blocks, more.swap_space) == (150, 0.0)


def test_gains_are_over_recomputing() -> None:
    rows = [
        Found("at once", name, 9, 0, seconds, 100, 0, 0, 0, 0, 0, 0)
        for name, seconds in (("recompute", 2.0), ("swap", 1.0))
    ]
    assert ["1.00x" in line or "2.00x" in line for line in table(rows).splitlines()] == [
        False,
        True,
        True,
    ]
    assert table(rows, as_markdown=True).count("|---") == 12


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.json"
    config = byte_llama(tmp_path / "model") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 640}))
    main(
        [
            *f"bench swap {config.parent} --device cpu --dtype float32 --repeats 1".split(),
            *("--requests", "12", "--max-output", "60", "--prompts", "3", "--prompt-len", "80"),
            *("--pool", "30", "--markdown", "--json", str(path)),
        ]
    )
    text = capsys.readouterr().out
    found = {(f["load"], f["way"]): f for f in json.loads(path.read_text())["measured"]}
    assert len(found) == 8 and text.count("\n| ") == 9
    crowd, swapped = found["at once", "recompute"], found["at once", "swap"]
    assert crowd["preemptions"] > 0 == crowd["swaps"] and crowd["recomputed_tokens"] > 0
    assert swapped["swaps"] == swapped["preemptions"] > 0 == swapped["recomputed_tokens"]
    turns = {way: found["by turns", way]["prefix_hit_tokens"] for way in ("recompute", "swap")}
    assert turns["swap"] >= 3 * 64 > turns["recompute"]
