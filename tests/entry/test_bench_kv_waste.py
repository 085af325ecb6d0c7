"""KV waste: the accounting adds up in every step, and the paged cache keeps its promise."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from octavo.core.config import ConfigError
from octavo.core.entry.bench.contiguous import ALLOCATORS, Chunk
from octavo.core.entry.bench.kv_waste import (
    RESERVATIONS,
    STATES,
    Lengths,
    Pool,
    Replay,
    Usage,
    make_trace,
    replay_contiguous,
    replay_paged,
)
from octavo.core.entry.cli.main import main

SMALL = Pool(slots=4000, max_model_len=512, max_num_batched_tokens=512)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("slots", [1, 64, 1000, 4095])
def test_chunks_never_overlap_and_nothing_is_lost(allocator: str, slots: int) -> None:
    dice = random.Random(slots)
    memory = ALLOCATORS[allocator](slots)
    largest = memory.largest
    held: list[Chunk] = []
    for _ in range(600):
        if held and dice.random() < 0.45:
            memory.give(held.pop(dice.randrange(len(held))))
        elif (chunk := memory.take(dice.randint(1, max(1, slots // 4)))) is not None:
            held.append(chunk)
        taken = [slot for start, size in held for slot in range(start, start + size)]
        assert len(set(taken)) == len(taken) and all(0 <= slot < slots for slot in taken)
        assert memory.free == slots - len(taken)
    for chunk in held:
        memory.give(chunk)
    assert memory.free == slots and memory.take(largest) is not None
    assert ALLOCATORS[allocator](slots).take(largest + 1) is None


def test_a_buddy_rounds_up_and_first_fit_does_not() -> None:
    buddy, first_fit = ALLOCATORS["buddy"](64), ALLOCATORS["first-fit"](64)
    assert buddy.take(5) == (0, 8) and buddy.take(8) == (8, 8) and buddy.take(33) is None
    assert first_fit.take(5) == (0, 5) and first_fit.take(59) == (5, 59)
    first_fit.give((0, 5))
    assert first_fit.take(6) is None and first_fit.take(3) == (0, 3)


@pytest.mark.parametrize("strategy", [*RESERVATIONS, "paged"])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_states_add_up_to_the_pool_in_every_step(strategy: str, allocator: str) -> None:
    trace = make_trace("sharegpt", SMALL.max_model_len, 150, 3)
    seen: list[tuple[Usage, bool]] = []

    def watch(usage: Usage, waiting: bool) -> None:
        assert usage.total == SMALL.slots
        assert all(getattr(usage, state) >= 0 for state in STATES), usage
        seen.append((usage, waiting))

    if strategy == "paged":
        result = replay_paged(trace, SMALL, watch)
    else:
        result = replay_contiguous(trace, SMALL, strategy, allocator, watch)
    assert result.steps == len(seen)
    waiting = [usage for usage, waits in seen if waits]
    assert result.waiting_steps == len(waiting) > 0
    for state in STATES:
        mean = fmean(getattr(usage, state) for usage in waiting) / SMALL.slots
        assert result.shares[state] == pytest.approx(mean)
    assert sum(result.shares.values()) == pytest.approx(1)
    assert result.waste + result.shares["used"] + result.shares["free"] == pytest.approx(1)
    if strategy == "oracle":
        assert result.shares["internal"] == 0
    if strategy == "paged":
        assert result.shares["external"] == 0
    if strategy == "oracle" and allocator == "first-fit":
        # A hole is fragmentation only when all holes together would do.
        assert any(usage.external and not usage.free for usage in waiting)
        assert all(not (usage.external and usage.free) for usage in waiting)


def test_one_request_by_hand() -> None:
    pool = Pool(slots=64, block_size=16, max_model_len=32, max_num_batched_tokens=8)
    # 10 prompt and 5 output tokens: 14 are stored. Steps: 8 and 2 of the prompt, then 4 tokens.
    trace = [Lengths(10, 5)]
    steps: list[Usage] = []
    replay_paged(trace, pool, lambda usage, _: steps.append(usage))
    assert [usage.used for usage in steps] == [8, 10, 11, 12, 13, 14]
    # 16 slots of the null block, and the 2 of the last block that are never filled.
    assert {(usage.internal, usage.free) for usage in steps} == {(18, 32)}
    for name, internal, rounding in (("max", 18, 0), ("power of two", 2, 0), ("oracle", 0, 2)):
        steps.clear()
        result = replay_contiguous(trace, pool, name, "buddy", lambda u, _: steps.append(u))
        assert [usage.used for usage in steps] == [8, 10, 11, 12, 13, 14]
        assert {(usage.internal, usage.external) for usage in steps} == {(internal, rounding)}
        assert result.waiting_steps == 0 and result.waste == 0  # nobody waited


@pytest.fixture(scope="module")
def sharegpt() -> dict[str, Replay]:
    pool = Pool()
    trace = make_trace("sharegpt", pool.max_model_len, 400)
    contiguous = {name: replay_contiguous(trace, pool, name) for name in RESERVATIONS}
    return contiguous | {"paged": replay_paged(trace, pool)}


def test_paging_wastes_less_than_four_percent(sharegpt: dict[str, Replay]) -> None:
    assert sharegpt["paged"].waste < 0.04
    assert sharegpt["paged"].waiting_steps > 1000
    used = {name: replay.shares["used"] for name, replay in sharegpt.items()}
    assert used["max"] < used["power of two"] <= used["oracle"] < 0.6 < 0.9 < used["paged"]
    running = {name: replay.running for name, replay in sharegpt.items()}
    assert running["max"] < running["oracle"] < running["paged"]
    assert sharegpt["paged"].steps < sharegpt["oracle"].steps < sharegpt["max"].steps


def test_traces_have_the_means_of_their_data_sets_and_are_the_same_everywhere() -> None:
    for name, prompt, output in (("sharegpt", 161, 338), ("alpaca", 19, 58)):
        trace = make_trace(name, 2048)
        assert fmean(lengths.prompt for lengths in trace) == pytest.approx(prompt, abs=0.5)
        assert fmean(lengths.output for lengths in trace) == pytest.approx(output, abs=0.5)
        assert trace == make_trace(name, 2048)
        assert trace != make_trace(name, 2048, seed=99)
        assert max(lengths.prompt + lengths.output for lengths in trace) <= 2048
        assert min(lengths.prompt for lengths in trace) >= 1
    first = [(lengths.prompt, lengths.output) for lengths in make_trace("sharegpt", 2048)[:3]]
    assert first == [(32, 196), (267, 80), (197, 104)]


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="512 slots in one piece"):
        replay_contiguous([Lengths(5, 5)], Pool(slots=500, max_model_len=512), "max")
    with pytest.raises(ConfigError, match="did you mean 'alpaca'"):
        make_trace("alpcaa", 2048)


def test_the_command_writes_table_json_and_figures_without_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    record = tmp_path / "kv.json"
    arguments = ["bench", "kv-waste", "--num-requests", "60", "--slots", "4096"]
    arguments += ["--max-model-len", "512", "--json", str(record), "--plot", str(tmp_path / "p")]
    code = (
        f"import sys; from octavo.core.entry.cli.main import main; main({arguments!r})\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in ("sharegpt", "alpaca", "oracle", "paged, block 16", "waste = reserved"):
        assert word in done.stdout
    found = json.loads(record.read_text())
    names = [s["name"] for s in found["traces"]["alpaca"]["strategies"]]
    assert names == ["max", "power of two", "oracle", "paged, block 16"]
    assert found["pool"]["slots"] == 4096
    for suffix in ("png", "svg"):
        assert (tmp_path / "p" / f"kv_waste.{suffix}").stat().st_size > 5000


def test_a_plot_without_its_library_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as caught:
        main(["bench", "kv-waste", "--plot", str(tmp_path / "p")])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "octavo[bench]" in error and not (tmp_path / "p").exists()
