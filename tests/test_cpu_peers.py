"""`ci/bench/cpu_peers.py`: everything about it that needs no other engine."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cpu_peers
import pytest

from octavo.core.config import ConfigError
from peers import engines, plot, table
from peers.engines import BASELINE, Engine, Places, Prepared
from peers.environments import Environments
from peers.job import Item, Job
from peers.measure import measure, wait_idle
from peers.models import Models
from peers.processes import PeerError, group
from peers.runner import Runner, Settings
from peers.store import Result, Store
from peers.works import WORKS, make_job

ROOT = Path(__file__).parents[1]

# An engine as an adapter sees one; options["behave"] says how it goes wrong.
FAKE = """
import os, subprocess, sys, time
from pathlib import Path
from peers.adapters.child import Refused, main

class Fake:
    def __init__(self, job):
        self.behave = job.options["behave"]
        print("engines print freely")
        if self.behave == "refuse":
            raise Refused("no such option")
        if self.behave == "crash":
            sys.stderr.write("out of luck\\n")
            os._exit(3)
        if self.behave == "hang":
            child = subprocess.Popen(["sleep", "600"])
            Path(job.options["pids"]).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        with open(job.options["seen"], "a") as seen:
            seen.write(job.to_json() + "\\n")

    def run(self, items):
        short = 1 if self.behave == "short" else 0
        return [[len(item.prompt)] * (item.output - short) for item in items]

    def close(self):
        pass

main(Fake)
"""


def encode(text: str) -> list[int]:
    return [len(word) * 1009 + ord(word[0]) for word in text.split()]


@pytest.fixture
def jobs() -> dict[str, Job]:
    works = ("sharegpt", "startup", "prefill160")
    return {name: make_job(name, encode, requests=3, threads=1) for name in works}


class Bench:
    """A folder with fake engines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "fake.py"
        self.script.write_text(FAKE)
        self.store = Store(folder / "results", "here")
        environments = Environments(folder, may_install=False)
        self.places = Places(environments, Models(folder, "none", environments), 1)

    def prepared(self, name: str, behave: str = "work") -> Prepared:
        seen, pids = str(self.folder / f"{name}.seen"), str(self.folder / f"{name}.pids")
        return Prepared(
            (sys.executable, "-P", str(self.script)),
            "1.0",
            {"behave": behave, "seen": seen, "pids": pids},
            {"PYTHONPATH": str(ROOT / "ci" / "bench")},
        )

    def engine(
        self,
        name: str,
        behave: str = "work",
        works: Sequence[str] = ("sharegpt", "startup", "prefill160"),
        **first: int,
    ) -> Engine:
        ready = self.prepared(name, behave)
        return Engine(name, "fake", behave, tuple(works), lambda places: ready, first)

    def seen(self, name: str) -> list[Job]:
        path = self.folder / f"{name}.seen"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Job.from_json(line) for line in lines]

    def run(self, engines: Sequence[Engine], jobs: dict[str, Job], **settings: Any) -> list[Result]:
        values: dict[str, Any] = {"runs": 1, "wait": 0.0, "timeout": 60.0} | settings
        runner = Runner(engines, jobs, self.places, self.store, Settings(self.folder, **values))
        runner.run()
        return runner.known()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_engine_gets_the_same_token_ids(bench: Bench, jobs: dict[str, Job]) -> None:
    results = bench.run([bench.engine("a"), bench.engine("b", sharegpt=2)], jobs)
    assert {r.status for r in results} == {"ok"}
    a, b = ({j.work: j for j in bench.seen(name)} for name in "ab")
    assert set(a) == set(b) == set(jobs)
    for work in jobs:
        assert a[work].items[: len(b[work].items)] == b[work].items
        assert a[work].warm_up == b[work].warm_up
        assert a[work].items == jobs[work].items
    assert (len(a["sharegpt"].items), len(b["sharegpt"].items)) == (3, 2)
    [tokens] = [r.tokens for r in results if (r.engine, r.work) == ("b", "sharegpt")]
    assert tokens == [[len(i.prompt)] * i.output for i in b["sharegpt"].items]


def test_works_are_the_benchmarks_own_and_no_prompt_is_known_from_the_warm_up() -> None:
    from octavo.core.entry.bench.workload import make_workload

    ours = make_job("sharegpt", encode, requests=None, threads=2)
    theirs = make_workload("sharegpt", encode)
    assert [(i.prompt, i.output) for i in ours.items] == [
        (i.prompt_token_ids, i.output_len) for i in theirs.items
    ]
    prefill = make_job("prefill512", encode, requests=None, threads=2)
    assert prefill.sequential and {(len(i.prompt), i.output) for i in prefill.items} == {(512, 1)}
    starts = [tuple(i.prompt[:16]) for i in [*prefill.warm_up, *prefill.items]]
    assert len(set(starts)) == len(starts)
    for name in WORKS:
        job = make_job(name, encode, requests=2, threads=2)
        assert Job.from_json(job.to_json()) == job
        assert job.warm_up or job.kind != "throughput"


def test_a_stopped_run_goes_on_where_it_was(bench: Bench, jobs: dict[str, Job]) -> None:
    engine = bench.engine("a")

    class Stop(Exception):
        pass

    def stopping(*arguments: Any, **named: Any) -> Result:
        if len(bench.seen("a")) == 2:
            raise Stop
        return measure(*arguments, **named)

    settings = Settings(bench.folder, runs=2, wait=0.0)
    runner = Runner([engine], jobs, bench.places, bench.store, settings, stopping)
    with pytest.raises(Stop):
        runner.run()
    assert len(runner.known()) == 2
    results = bench.run([engine], jobs, runs=2)
    # two runs of three works, and the first start; nothing twice
    assert len(bench.seen("a")) == len(results) == 7
    bench.run([engine], jobs, runs=2)
    assert len(bench.seen("a")) == 7
    bench.run([engine], jobs, runs=3)
    assert len(bench.seen("a")) == 10
    bench.run([engine], jobs, runs=1, fresh=True)
    assert len(bench.seen("a")) == 14


def test_what_is_known_depends_on_version_work_and_options(
    bench: Bench, jobs: dict[str, Job]
) -> None:
    job = jobs["sharegpt"].with_options({"slots": 32})
    result = Result("a", "1.0", "sharegpt", 1, job.digest(), "ok", values={"output": 5.0})
    path = bench.store.save(result)
    assert bench.store.load("a", "1.0", "sharegpt", job.digest(), 1) == result
    others = (
        ("b", "1.0", job.digest(), 1),
        ("a", "1.1", job.digest(), 1),
        ("a", "1.0", job.digest(), 2),
        ("a", "1.0", job.with_options({"slots": 8}).digest(), 1),
        ("a", "1.0", job.first(2).digest(), 1),
    )
    for engine, version, digest, run in others:
        assert bench.store.load(engine, version, "sharegpt", digest, run) is None
    assert (
        Store(bench.folder / "results", "there").load("a", "1.0", "sharegpt", job.digest(), 1)
        is None
    )
    assert replace(job, spawned=3.0).digest() == job.digest()
    path.write_text(path.read_text()[:-20])  # a disk that was full
    assert bench.store.load("a", "1.0", "sharegpt", job.digest(), 1) is None


@pytest.mark.parametrize(
    ("behave", "status", "reason"),
    [
        ("crash", "failed", "the process ended with 3 and no result: "),
        ("short", "failed", "a request brought"),
        ("refuse", "refused", "no such option"),
    ],
)
def test_an_engine_that_fails_is_a_row_and_the_others_go_on(
    bench: Bench, jobs: dict[str, Job], behave: str, status: str, reason: str
) -> None:
    both = [bench.engine("bad", behave, works=("sharegpt",)), bench.engine("good")]
    results = bench.run(both, jobs, runs=2)
    bad = [r for r in results if r.engine == "bad"]
    assert [(r.status, r.run) for r in bad] == [(status, 1)]  # not asked a second time
    assert reason in bad[0].reason
    assert len([r for r in results if r.engine == "good" and r.status == "ok"]) == 7
    rows = table.make_rows(both, list(jobs), results)
    text = table.markdown(rows, list(jobs), {})
    [line] = [line for line in text.splitlines() if line.startswith("| bad |")]
    assert f"{status}: " in line and reason.split(":")[0] in line
    [line] = [line for line in text.splitlines() if line.startswith("- bad, sharegpt")]
    assert reason in line


def test_a_failure_is_tried_again_by_the_next_call(bench: Bench, jobs: dict[str, Job]) -> None:
    jobs = {"sharegpt": jobs["sharegpt"]}
    calls = []

    def failing(engine: str, prepared: Prepared, job: Job, run: int, **named: Any) -> Result:
        calls.append(run)
        status = "ok" if len(calls) > 1 else "failed"
        return Result(engine, "1.0", job.work, run, job.digest(), status)  # type: ignore[arg-type]

    for expected in ([1], [1, 1, 2], [1, 1, 2]):
        settings = Settings(bench.folder, runs=2)
        runner = Runner([bench.engine("a")], jobs, bench.places, bench.store, settings, failing)
        runner.run()
        assert calls == expected


def test_an_engine_that_cannot_be_installed_is_a_row(bench: Bench, jobs: dict[str, Job]) -> None:
    def prepare(places: Places) -> Prepared:
        raise PeerError("no compiler")

    missing = Engine("missing", "fake", "", ("sharegpt",), prepare)
    rows = table.make_rows([missing], list(jobs), bench.run([missing], jobs))
    assert rows[0].failure == "failed: no compiler"


def test_an_engine_that_takes_too_long_is_given_up(bench: Bench) -> None:
    prepared = bench.prepared("a", "hang")
    job = Job("single", "throughput", [Item([1], 1)], options=prepared.options)
    result = measure("a", prepared, job, 1, work_folder=bench.folder, timeout=0.2, wait=0.0)
    assert (result.status, result.reason) == ("failed", "no result within 0.2 s")


def test_an_engine_is_ended_with_all_it_started(bench: Bench) -> None:
    prepared, pids = bench.prepared("a", "hang"), bench.folder / "a.pids"
    job, log = bench.folder / "job.json", bench.folder / "log"
    job.write_text(Job("single", "throughput", [Item([1], 1)], options=prepared.options).to_json())

    def until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with (
        pytest.raises(KeyboardInterrupt),
        group([*prepared.command, str(job)], log, log, prepared.environment),
    ):
        until(lambda: pids.exists() and pids.read_text().count(" ") == 1)
        raise KeyboardInterrupt
    for pid in map(int, pids.read_text().split()):
        until(lambda pid=pid: not _runs(pid))  # type: ignore[misc]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # What nobody waits for is a zombie until the system's first process gets to it.
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_waiting_for_an_idle_machine(capsys: pytest.CaptureFixture[str]) -> None:
    shares = iter([0.5, 0.2, 0.01])
    _, busy = wait_idle(60.0, lambda: next(shares))
    assert busy is None and "50%" in capsys.readouterr().out
    _, busy = wait_idle(0.0, lambda: 0.4)
    assert busy == "others took 40% of the machine before the run"


def _result(engine: str, work: str, run: int, value: float, **more: Any) -> Result:
    metric = WORKS[work].metric
    return Result(engine, "1", work, run, "", "ok", values={metric: value}, **more)


def _engine(name: str, family: str) -> Engine:
    return Engine(name, family, "", tuple(WORKS), lambda places: Prepared((), "1"))


def _rows(results: list[Result], eos: frozenset[int] = frozenset()) -> list[table.Row]:
    known = [_engine("octavo-x", "octavo"), _engine(BASELINE, "p"), _engine("peer", "p")]
    return table.make_rows(known, list(WORKS), results, eos)


def test_medians_ratios_and_marks() -> None:
    results = [
        _result("octavo-x", "sharegpt", run, v) for run, v in ((1, 10.0), (2, 90.0), (3, 30.0))
    ]
    results += [_result("octavo-x", "startup", run, v) for run, v in ((0, 9.0), (1, 2.0))]
    results += [_result(BASELINE, "sharegpt", 1, 3.0, peak_rss_bytes=10**9)]
    results += [_result("peer", "sharegpt", 1, 60.0, disturbed="others took 9%")]
    results += [_result("peer", "startup", 1, 8.0)]
    rows = _rows(results)
    assert rows[0].cells["sharegpt"].value == 30.0 and rows[0].cells["startup"].value == 2.0
    assert rows[0].first_start == 9.0
    found = table.ratios(rows)
    assert found == {
        "octavo-x": {BASELINE: {"sharegpt": 10.0}, "peer": {"sharegpt": 0.5, "startup": 4.0}}
    }
    text = table.markdown(rows, list(WORKS), {"machine": "this"})
    assert "| peer | 60.0 † |" in text and "- machine: this" in text
    [line] = [line for line in text.splitlines() if line.startswith(f"| {BASELINE} | 10.00")]
    assert line.count("–") == len(line.split("|")) - 4  # nothing else was measured on both


def test_memory_is_that_of_the_largest_work_and_less_is_better() -> None:
    rows = _rows(
        [
            _result("octavo-x", "sharegpt", 1, 1.0, peak_rss_bytes=500_000_000),
            _result("octavo-x", "single", 1, 1.0, peak_rss_bytes=400_000_000),
            _result("peer", "sharegpt", 1, 1.0, peak_rss_bytes=10**9),
        ]
    )
    assert [row.peak_rss_mb for row in rows] == [500.0, 1000.0]
    assert table.ratios(rows)["octavo-x"]["peer"][table.RSS] == 2.0


def test_tokens_are_compared_up_to_the_end_of_text() -> None:
    reference = [[5, 6, 7], [5, 2, 9], [1, 1, 1]]
    ours = [[5, 6, 7], [5, 3, 3], [1, 1, 2], [8, 8, 8]]
    rows = _rows(
        [
            _result(BASELINE, "sharegpt", 1, 1.0, tokens=reference),
            _result("peer", "sharegpt", 1, 1.0, tokens=ours),
        ],
        frozenset({2}),
    )
    assert [row.same_tokens for row in rows] == [(3, 3), (2, 3)]


def test_the_engines_own_tool_is_a_table_of_its_own() -> None:
    runs = [
        Result("peer", "1", "batched", run, "", "ok", batched=[
            {"width": 1, "prefill": p, "decode": 7.0}
        ])
        for run, p in ((1, 100.0), (2, 300.0), (3, 200.0))
    ]  # fmt: skip
    rows = _rows(runs)
    assert rows[0].batched == [{"width": 1, "prefill": 200.0, "decode": 7.0}]
    assert "| peer | 1 | 200 | 7.00 |" in table.markdown(rows, list(WORKS), {})


def test_the_figure(tmp_path: Path) -> None:
    rows = _rows([_result("octavo-x", "sharegpt", 1, 3.0), _result("peer", "startup", 1, 1.0)])
    written = plot.draw(tmp_path / "figures" / "all", rows, list(WORKS), "title")
    assert [path.name for path in written] == ["all.png", "all.svg"]
    assert all(path.stat().st_size > 1000 for path in written)
    assert plot.draw(tmp_path / "none", rows, ["prefix"], "title") == []


def test_octavo_says_which_flags_it_does_not_take(bench: Bench, jobs: dict[str, Job]) -> None:
    command = (sys.executable, "-P", "-m", "peers.adapters.octavo_engine")
    environment = {"PYTHONPATH": str(ROOT / "ci" / "bench")}
    prepared = Prepared(command, "1", {"model": "x", "flags": ["--no-such-flag"]}, environment)
    job = jobs["sharegpt"].with_options(prepared.options)
    result = measure("o", prepared, job, 1, work_folder=bench.folder, timeout=120.0, wait=0.0)
    assert (result.status, result.reason) == ("refused", "unrecognized arguments: --no-such-flag")


def test_variants_are_flags_and_mistakes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = engines.variant("big=--max-num-seqs 8 --dtype float32")
    assert (found.name, found.family) == ("octavo-big", "octavo")
    with pytest.raises(ConfigError, match="NAME=FLAGS"):
        engines.variant("--dtype float32")
    assert cpu_peers.main(["--work", str(tmp_path), "--only", "nobody"]) == 2
    assert "llamacpp-q8_0" in capsys.readouterr().err
    assert cpu_peers.main(["--work", str(tmp_path), "--work-items", "sharegtp"]) == 2
    assert "sharegpt" in capsys.readouterr().err
    everyone = engines.peers()
    assert len(engines.chosen(everyone, ["llamacpp"])) == 5
    assert [e.name for e in engines.chosen(everyone, ["openvino-int8"])] == ["openvino-int8"]


def test_the_report_of_nothing_installs_nothing(tmp_path: Path) -> None:
    output = tmp_path / "report"
    arguments = ["--work", str(tmp_path / "w"), "--output", str(output), "--report-only"]
    assert cpu_peers.main([*arguments, "--only", "vllm-cpu-f32,octavo"]) == 1
    found = json.loads((output / "cpu_peers.json").read_text())
    assert "failed" in (output / "cpu_peers.md").read_text()
    assert [row["engine"] for row in found["rows"]][-1] == "vllm-cpu-f32"
    assert not (tmp_path / "w" / "envs").exists() and not (tmp_path / "w" / "models").exists()
