"""Whatever comes, in whatever mix: blocks add up, KV is the right sequence's, everything ends.

`scenarios.play` runs a scenario and checks, after every step, the scheduler's and block manager's own
audit, the plan's limits, who owns what is written, and the content of every scheduled sequence's KV;
at the end, that each sample put out exactly the tokens it puts out alone, and that no block leaked.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenarios import Abort, Arrival, Scenario, play, random_lanes, random_scenario
from support import Rig, WatchedBlocks

_steps: list[int] = []
_lanes_used: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)  # by number of lanes
_seen = {
    "preemptions": 0,
    "evictions": 0,
    "prefix_hit_tokens": 0,
    "prefix_waits": 0,
    "copies": 0,
    "losses": 0,
    "drains": 0,
    "embeddings": 0,
}


@st.composite
def scenarios(draw: st.DrawFn, crowd: bool = False) -> Scenario:
    """crowd: they come at once, and many begin with what another is computing."""
    size = draw(st.sampled_from([1, 2, 4, 16]))
    longest = draw(st.sampled_from([8, 30, 100]))
    need = -(-longest // size)
    count = draw(st.integers(4 if crowd else 1, 12))
    length = st.integers(1, longest)
    arrivals = []
    for _ in range(count):
        prompt = draw(length)
        at = draw(st.integers(0, 3 if crowd else 30))
        shared = draw(st.sampled_from([prompt] if crowd else [0, prompt // 2, prompt]))
        limit = draw(st.one_of(st.none(), st.integers(0, 4 if crowd else 40)))
        # Nobody waits for a prefix whose sum is wanted, and crowds are there to wait.
        kinds = (None, "last", None, "last") if crowd else (None, "mean", "last", "cls")
        arrivals.append(
            Arrival(
                at=at,
                prompt_length=prompt,
                shared=shared,
                max_tokens=limit,
                pool=kinds[prompt % 4] if limit == 0 else None,
                n=draw(st.sampled_from([1, 1, 2, 4])),
                priority=draw(st.integers(-1, 1)),
                seed=draw(st.one_of(st.none(), st.integers(0, 9))),
                prompt_logprobs=draw(st.sampled_from([False, False, False, True])),
                salt=draw(st.sampled_from([None, None, "a"])),
                stops=draw(st.booleans()),
            )
        )
    abort = st.builds(
        Abort,
        st.integers(0, 5 if crowd else 50),
        st.integers(0, count - 1),
        st.sampled_from([None, 0, 1, 3]),
        st.booleans(),
    )
    return Scenario(
        blocks=1 + draw(st.integers(max(1, need // 2), 3 * need + 2)),
        block_size=size,
        budget=draw(st.sampled_from([8, 32, 200] if crowd else [1, 2, 3, 8, 32, 200])),
        max_num_seqs=draw(st.sampled_from([4, 16] if crowd else [1, 2, 4, 16])),
        rows=draw(st.sampled_from([1, 8, 300])),
        chunk_multiple=draw(st.sampled_from([1, 4])),
        max_model_len=longest,
        prefix_caching=crowd or draw(st.booleans()),
        arrivals=tuple(arrivals),
        aborts=tuple(draw(st.lists(abort, max_size=5))),
        failures=tuple(draw(st.one_of(st.just([]), st.lists(st.integers(1, 30), max_size=3)))),
        losses=count % 2 == 0,
        rest=(0, 1, 0, 3)[count % 4],
    )


thorough = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@thorough
@given(scenarios())
def test_any_scenario(scenario: Scenario) -> None:
    count(*play(scenario))


@thorough
@given(scenarios(crowd=True))
def test_any_crowd_with_one_beginning(scenario: Scenario) -> None:
    count(*play(scenario))


@thorough
@given(scenarios(), st.randoms(use_true_random=False))
def test_any_scenario_over_lanes(scenario: Scenario, dice: random.Random) -> None:
    """Two kinds of step, or two batches in one: nothing leaks, hangs or starves there either."""
    laned = random_lanes(dice, scenario)
    steps, r = play(laned)
    _lanes_used[len(laned.lanes)].update(r.runner.lanes_used)
    count(steps, r)


def count(steps: int, r: Rig) -> None:
    _steps.append(steps)
    stats = r.scheduler.stats()
    missed = sum(stats.prefix_miss_tokens.values())
    assert stats.prefix_hit_tokens + missed == stats.prefix_query_tokens
    for name in ("preemptions", "evictions", "prefix_hit_tokens", "prefix_waits"):
        _seen[name] += getattr(stats, name)
    _seen["copies"] += r.runner.copies
    _seen["embeddings"] += sum(u.embedding is not None for u in r.finished.values())
    _seen["losses"] += r.runner.losses
    assert isinstance(r.scheduler.blocks, WatchedBlocks)
    _seen["drains"] += r.scheduler.blocks.drains


def test_the_scenarios_were_many_and_hard() -> None:
    """The properties above are worth something only if what they are about did happen."""
    if not _steps:
        pytest.skip("counts what the tests above did in the same run")
    assert sum(_steps) >= 10_000
    assert min(_seen.pop("losses"), _seen.pop("embeddings")) >= 50, _seen
    assert all(count >= 200 for count in _seen.values()), _seen
    assert _lanes_used[1][0,] >= 200
    assert all(_lanes_used[2][lanes] >= 100 for lanes in ((0,), (1,), (0, 1))), _lanes_used
    assert all(_lanes_used[3][i,] >= 30 for i in range(3)), _lanes_used


def run_random(steps: int, seed: int, lanes: bool = False) -> int:
    """Plays random scenarios until `steps` steps were run; returns how many were."""
    done = number = 0
    while done < steps:
        key = seed * 1_000_003 + number
        dice = random.Random(key)
        scenario = random_scenario(dice)
        if lanes:
            scenario = random_lanes(dice, scenario)
        try:
            done += play(scenario)[0]
        except BaseException as error:
            error.add_note(f"number {key}: {scenario}")
            raise
        number += 1
    return done


def test_random_scenarios() -> None:
    assert run_random(10_000, seed=11) >= 10_000


def test_random_scenarios_over_lanes() -> None:
    assert run_random(10_000, seed=13, lanes=True) >= 10_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_steps(caplog: pytest.LogCaptureFixture) -> None:
    # pytest keeps every traceback of the steps that fail on purpose: hundreds of megabytes.
    caplog.set_level(logging.CRITICAL, logger="octavo")
    assert run_random(500_000, seed=12) >= 500_000
    assert run_random(500_000, seed=14, lanes=True) >= 500_000
