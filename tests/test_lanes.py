"""The table of lanes, what is made from it, and that a lane which shows nothing fails."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CI = ROOT / "ci"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


lanes = load("lanes")
results = load("lane_results")
session = load("lane_session")
made = load("make_workflow")


def test_the_workflow_and_the_page_are_made_from_the_table() -> None:
    for path, text in made.made().items():
        assert path.read_text("utf-8") == text, f"{path}: run python ci/make_workflow.py"


def test_every_lane_has_a_job_and_only_those_asked_for_wait_for_a_chip() -> None:
    jobs = yaml.safe_load(made.workflow())["jobs"]
    every = {row["lane"] for row in jobs["lanes"]["strategy"]["matrix"]["include"]}
    assert every == {lane.name for lane in lanes.every_run()}
    for lane in lanes.LANES:
        if not lane.every:
            (row,) = jobs[lane.name]["strategy"]["matrix"]["include"]
            assert row["runner"] == list(lane.runner)
            assert f"inputs.lane == '{lane.name}'" in jobs[lane.name]["if"]
    assert not any(lane.on_chip for lane in lanes.every_run())


def test_the_lanes_of_every_run_fit_their_time() -> None:
    assert sum(lane.minutes for lane in lanes.every_run()) <= lanes.EVERY_RUN_LIMIT


def test_the_table_is_whole() -> None:
    assert len(lanes.BY_NAME) == len(lanes.LANES)
    for lane in lanes.LANES:
        assert lane.requirements_file is None or lane.requirements_file.exists(), lane.name
        for step in lane.steps:
            judged = step.command.startswith(("pytest", "octavo backend check"))
            assert judged != bool(step.proof), f"{lane.name}: {step.command}"
        if lane.environment == "layer" and lane.requirements_file:
            pins = lane.requirements_file.read_text("utf-8").split()
            assert not any(p.startswith("torch==") and p != f"torch=={lanes.TORCH}" for p in pins)


def test_tests_that_need_a_lane_have_one() -> None:
    named = {word for lane in lanes.LANES for step in lane.steps for word in step.command.split()}
    for folder in (ROOT / "tests/lanes").glob("*/"):
        if any(folder.glob("test_*.py")):
            assert f"tests/lanes/{folder.name}" in named, f"{folder} is run by no lane"
    for path in (ROOT / "tests/lanes").rglob("*.py"):
        assert "importorskip" not in path.read_text("utf-8"), f"{path} could skip its kernels"


def test_ci_runs_the_lanes() -> None:
    assert "ci/lane --every" in (ROOT / ".ci/run").read_text("utf-8")


def run_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *steps: Any, **more: Any) -> Any:
    """One lane in this interpreter's environment: its result."""
    monkeypatch.setattr(session, "RESULTS", tmp_path / "out")
    monkeypatch.setattr(session, "PROJECT", Path(sys.prefix))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take most of the time
    lane = lanes.Lane("trial", "none", "executed", "nothing", tuple(steps), 1, **more)

    def error(reason: str) -> None:
        raise RuntimeError(reason)

    stand_in = SimpleNamespace(posargs=["-p", "no:cacheprovider"], error=error)
    if not steps[0].command.startswith("pytest"):
        stand_in.posargs = []
    failed = ""
    try:
        session.run(stand_in, lane)
    except RuntimeError as fault:
        failed = str(fault)
    result = results.read(tmp_path / "out/trial/result.json")
    assert result.passed == (not failed)
    return result


TESTS = {
    "passes": ("def test_a(): pass", True, ""),
    "is expected to fail": (
        "import pytest\n@pytest.mark.xfail(strict=True)\ndef test_a(): assert 0",
        True,
        "",
    ),
    "fails": ("def test_a(): assert 0", False, "failed"),
    "skips": (
        "import pytest\ndef test_b(): pass\ndef test_a(): pytest.skip('no triton')",
        False,
        "no triton",
    ),
    "skips its module": (
        "import pytest\nnothing = pytest.importorskip('no_such_module')\ndef test_a(): pass",
        False,
        "no_such_module",
    ),
    "is not there": ("", False, "no test ran"),
}


@pytest.mark.parametrize("case", TESTS)
def test_a_lane_that_skips_or_collects_nothing_fails(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, passes, fault = TESTS[case]
    (tmp_path / "test_it.py").write_text(body, "utf-8")
    step = lanes.Step(f"pytest {shlex.quote(str(tmp_path / 'test_it.py'))}")
    result = run_lane(tmp_path, monkeypatch, step)
    assert result.passed == passes, result
    assert any(fault in found for found in result.faults) or passes
    assert result.count == (1 if passes or case == "skips" else 0)


def test_the_slow_lane_may_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_it.py").write_text(TESTS["skips"][0], "utf-8")
    step = lanes.Step(f"pytest {tmp_path / 'test_it.py'}")
    assert run_lane(tmp_path, monkeypatch, step, skips=True).passed
    assert lanes.BY_NAME["slow"].skips and not any(lane.skips for lane in lanes.every_run())


@pytest.mark.parametrize(
    ("says", "passes"), [("7 kernels", True), ("0 kernels", False), ("nothing", False)]
)
def test_a_script_must_count_what_it_did(
    says: str, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = lanes.Step(f"python -c 'print(\"{says}\")'", r"(\d+) kernels")
    assert run_lane(tmp_path, monkeypatch, step).passed == passes


def test_a_script_that_fails_after_counting_fails_its_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = lanes.Step("python -c 'import sys; print(\"7 kernels\"); sys.exit(3)'", r"(\d+) kernels")
    assert run_lane(tmp_path, monkeypatch, step).faults[0].endswith("ended with status 3")


def test_a_scorecard_must_have_passed_something_in_each_group(tmp_path: Path) -> None:
    def row(group: str, state: str, cases: int = 3) -> dict[str, object]:
        return {"group": group, "op": "rotary", "dtype": "float32", "state": state, "cases": cases}

    card = tmp_path / "card.json"
    good = [row("contract", "passed"), row("op", "passed"), row("engine", "passed")]
    for rows, count, faults in (
        (good, 9, 0),
        ([*good, row("op", "failed")], 9, 1),
        ([*good[:1], row("op", "compiled"), *good[2:]], 6, 1),
        ([], 0, 3),
    ):
        card.write_text(json.dumps({"rows": rows}), "utf-8")
        found = results.of_scorecard(card)
        assert (found[0], len(found[1])) == (count, faults)
    assert results.of_scorecard(tmp_path / "none.json")[1]


def lane_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CI / "lane"), *words],
        check=False,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )


def test_the_list_and_an_unknown_lane() -> None:
    listed = lane_command("--list")
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(lanes.BY_NAME)
    unknown = lane_command("tritno")
    assert unknown.returncode == 2 and "triton" in unknown.stdout
