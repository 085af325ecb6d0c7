"""The scheduler's benchmark: its cases are what they say, and the command writes what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.core.batch import BatchBuilder
from octavo.core.contract import Lane
from octavo.core.entry.bench.scheduling import CASES, _Load, measure
from octavo.core.entry.cli.main import main


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("running", [1, 5])
def test_as_many_run_and_wait_as_asked_for(case: str, running: int) -> None:
    load = _Load(case, running, waiting=7, steps=100)
    builder = BatchBuilder(Lane(), 16)
    for _ in range(120):
        times = load.step(builder)
        assert len(times) == 3 and min(times) >= 0
        stats = load.scheduler.stats()
        if case != "turnover":
            assert (stats.running, stats.waiting, stats.preemptions) == (running, 7, 0)
        assert stats.running + stats.waiting == running + 7
    if case == "turnover":
        assert stats.finished["length"] >= 2 * running and stats.prefix_hit_tokens > 0
    elif case == "memory":
        assert stats.running < load.limits.max_num_seqs


def test_every_combination_is_measured() -> None:
    found = measure(["decode"], [1, 2], [1, 3], steps=5)
    assert [(m.running, m.waiting) for m in found] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    parts = ("schedule", "build batch", "commit")
    for one in found:
        assert one.of("sum")["mean"] == pytest.approx(sum(one.of(part)["mean"] for part in parts))


def test_the_command_prints_and_writes_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    arguments = ["bench", "scheduler", "--running", "1,2", "--waiting", "3", "--steps", "10"]
    arguments += ["--json", str(path)]
    code = (
        f"import sys; from octavo.core.entry.cli.main import main; main({arguments!r})\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in (*CASES, "build batch", "Microseconds"):
        assert word in done.stdout
    found = json.loads(path.read_text())
    assert [(m["case"], m["running"]) for m in found["measures"]] == [
        (case, running) for case in CASES for running in (1, 2)
    ]
    assert all(len(m["seconds"]) == 10 and m["sum"]["p50"] > 0 for m in found["measures"])
    assert found["machine"]["cores"] >= 1


def test_an_unknown_case_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "scheduler", "--case", "decod"])
    assert caught.value.code == 2 and "did you mean 'decode'" in capsys.readouterr().err
