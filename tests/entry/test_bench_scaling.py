"""`octavo bench scaling`, and a busy neighbour of `octavo bench throughput`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tiny_models import make

from octavo.core.entry.bench.neighbours import spinning
from octavo.core.entry.bench.scaling import Point, line
from octavo.core.entry.bench.workload import make_workload
from octavo.core.entry.cli.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make("Llama", {}).save_pretrained(path)
    return path


def test_the_line_through_points() -> None:
    points = [Point(1, x, 0.5 + 0.25 * x, None) for x in (1.0, 2.0, 4.0)]
    assert line(points) == pytest.approx((0.5, 0.25))
    assert line(points[:1]) is None and line([points[0], points[0]]) is None


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "s.json"
    words = (
        f"bench scaling {folder} --device cpu --batch 1,3,9 --batch-context 20 "
        "--context 32,64,128,256 --repeats 3 --markdown"
    )
    main([*words.split(), "--json", str(path), "--plot", str(tmp_path / "p")])
    text = capsys.readouterr().out
    assert "| sequences | context | step ms | tok/s | times the first |" in text
    assert "contexts 256 left out: the engine takes sequences of 128 tokens" in text
    found = json.loads(path.read_text())
    assert [p["sequences"] for p in found["by_sequences"]] == [1, 3, 9]
    for point in found["by_sequences"]:
        assert 15 <= point["context"] <= 25
        assert point["tokens_per_second"] == pytest.approx(point["sequences"] / point["seconds"])
    short, middle, longest = found["by_context"]
    assert abs(short["context"] - 32) <= 3 and abs(middle["context"] - 64) <= 3
    assert 115 <= longest["context"] <= 128  # cut by what it draws
    assert all(p["attention_seconds"] < p["seconds"] for p in found["by_context"])
    assert found["too_long"] == [256] and set(found["line"]) == {
        "base_seconds",
        "seconds_per_token",
    }
    for suffix in ("png", "svg"):
        assert (tmp_path / "p" / f"scaling.{suffix}").stat().st_size > 5000


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_neighbours_spin_and_end() -> None:
    import psutil

    me = psutil.Process()
    before = set(me.children())
    with spinning(2):
        ours = [child for child in me.children() if child not in before]
        assert len(ours) == 2
        for child in ours:
            while sum(child.cpu_times()[:2]) < 0.05:  # never true of one that sleeps
                pass
    assert not any(child.is_running() for child in ours)


def test_a_second_run_shares_no_beginning_with_the_first() -> None:
    known: dict[str, int] = {}
    first = make_workload(
        "sharegpt", lambda text: [known.setdefault(w, len(known)) for w in text.split()]
    )
    second = first.again()
    assert second.output_tokens == first.output_tokens
    for a, b in zip(first.items, second.items, strict=True):
        assert sorted(a.prompt_token_ids) == sorted(b.prompt_token_ids)
        assert a.prompt_token_ids[:8] != b.prompt_token_ids[:8]


@pytest.mark.slow
def test_throughput_beside_a_neighbour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    main(
        "bench throughput --workload uniform --num-requests 1 --max-num-seqs 1 --kv-memory 32M "
        f"--busy-neighbour 1 --json {path}".split()
    )
    assert "beside 1 spinning processes" in capsys.readouterr().out
    found = json.loads(path.read_text())
    beside = found["busy_neighbour"]
    assert beside["processes"] == 1 and beside["octavo"]["output_tokens"] == 64
    assert beside["octavo"]["cached_tokens"] == 0
    ratio = (
        beside["octavo"]["output_tokens_per_second"] / found["octavo"]["output_tokens_per_second"]
    )
    assert beside["ratio_output"] == pytest.approx(ratio)
