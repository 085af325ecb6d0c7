"""Beams in pools that are too small for all who want them: nobody starves, nothing leaks, and everybody
gets what he gets alone.

The audits of `support` hold throughout: no block is written that has two owners, a group that is computed
again included.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from beam_support import BeamRunner, beams, check, letters
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scenarios import Scenario, random_lanes
from support import Rig, expected_tokens, request, rig

from octavo.core import intake, planner
from octavo.core.params import RequestRefused
from octavo.core.scheduler import MAX_PREEMPTIONS
from octavo.core.types import Request

LONGEST = 28
_seen: Counter[str] = Counter()


@dataclass(frozen=True)
class Crowd:
    """Who comes into which pool. `slack`: blocks beyond what the largest needs alone."""

    seed: int
    block_size: int
    slack: int
    max_num_seqs: int
    budget: int
    chunk_multiple: int
    prefix_caching: bool
    rest: int
    lanes: bool
    aborts: bool
    priorities: bool
    most: int  # preemptions of a group: fewer than in earnest, so that the last resort is needed often
    shape: str  # mixed; groups behind single ones that grow, "behind"; equal groups, "alike"


crowds = st.builds(
    Crowd,
    seed=st.integers(0, 10**6),
    block_size=st.sampled_from([1, 2, 3, 4]),
    slack=st.integers(0, 3),
    max_num_seqs=st.sampled_from([4, 9, 16]),
    budget=st.sampled_from([4, 16, 64]),
    chunk_multiple=st.sampled_from([1, 1, 4]),
    prefix_caching=st.booleans(),
    rest=st.sampled_from([0, 0, 2]),
    lanes=st.booleans(),
    aborts=st.sampled_from([False, False, True]),
    priorities=st.booleans(),
    most=st.sampled_from([1, 1, 2, MAX_PREEMPTIONS]),
    shape=st.sampled_from(["mixed", "behind", "alike"]),
)


def arrivals(crowd: Crowd, dice: random.Random) -> list[tuple[int, Request]]:
    """(step, request) in order."""
    found = []
    count = dice.randint(3, 9)
    for i in range(count):
        name, prompt = (
            f"{crowd.seed}-{i}",
            dice.choice([1, 2, 3, 5, dice.randrange(1, LONGEST // 2)]),
        )
        length = dice.randrange(2, LONGEST - prompt)
        if crowd.shape == "alike" or dice.random() < 0.6:  # they start together, and cannot stay so
            length = LONGEST - prompt
        common: dict[str, Any] = {
            "max_tokens": length,
            "priority": dice.choice([0, 1]) if crowd.priorities else 0,
            "prompt_logprobs": 0 if dice.random() < 0.1 else None,
        }
        kind = dice.random()
        if crowd.shape == "alike":
            kind = 0.0
        elif crowd.shape == "behind":
            kind = 1.0 if i < count - 2 else 0.0
        if kind < 0.6:
            common["stop"] = ["b", "yes"] if dice.random() < 0.2 else None
            endless = crowd.shape != "mixed" or dice.random() < 0.5
            wide = 2 if crowd.shape == "alike" else dice.choice([1, 2, 2, 3, 4])
            one = beams(name, prompt, wide, ignore_eos=endless, **common)
        elif kind < 0.8:  # drawn samples, of which the best are wanted
            one = request(
                name, prompt, n=2, best_of=dice.randrange(2, 5), temperature=1.0, seed=i, **common
            )
        else:
            one = request(name, prompt, **common)
        found.append((dice.randrange(8) if crowd.shape == "mixed" else i, one))
    return sorted(found, key=lambda each: each[0])


def largest(block_size: int, request: Request) -> int:
    """Blocks that a request may hold alone."""
    params, prompt = request.params, len(request.prompt_token_ids)
    stored = -(-(prompt + (params.max_tokens or 0) - 1) // block_size)
    shared = prompt // block_size
    wide = params.width if params.use_beam_search else 1
    return shared + wide * (max(stored, shared) - shared)


def play(crowd: Crowd) -> Rig:
    planner.MAX_PREEMPTIONS = intake.MAX_PREEMPTIONS = crowd.most
    try:
        return _play(crowd)
    finally:
        planner.MAX_PREEMPTIONS = intake.MAX_PREEMPTIONS = MAX_PREEMPTIONS


def _play(crowd: Crowd) -> Rig:
    dice = random.Random(crowd.seed)
    coming = arrivals(crowd, dice)
    lanes, seqs, rows = (), crowd.max_num_seqs, 64
    if crowd.lanes:
        scenario = Scenario(
            0, crowd.block_size, crowd.budget, seqs, rows, 1, LONGEST, crowd.prefix_caching, (), ()
        )
        made_of = random_lanes(dice, scenario)
        lanes, seqs, rows = made_of.lanes, made_of.max_num_seqs, made_of.rows
    need = max(largest(crowd.block_size, each) for _, each in coming)
    made = rig(
        blocks=1 + need + crowd.slack, block_size=crowd.block_size, max_num_seqs=seqs,
        budget=crowd.budget, prefix_caching=crowd.prefix_caching, rest=crowd.rest, rows=rows,
        chunk_multiple=crowd.chunk_multiple, max_model_len=LONGEST, lanes=lanes, runner=BeamRunner,
    )  # fmt: skip
    made.engine._texts = letters()
    asked: list[Request] = []
    gone: set[str] = set()
    for now in range(20_000):
        while coming and coming[0][0] <= now:
            _, each = coming.pop(0)
            try:
                made.engine.add(each)
            except RequestRefused as error:
                assert sum(c.isdigit() for c in str(error)) >= 2, error
                _seen["refused"] += 1
            else:
                asked.append(each)
        if crowd.aborts and asked and dice.random() < 0.05:
            name = dice.choice(asked).id
            ends = made.engine.abort([name])
            gone.update(end.request_id for end in ends)
            made.take(ends)
            made.scheduler.check()
        if made.engine.has_unfinished():
            made.step()
            groups = [s for s in made.scheduler.sequences() if s.beams is not None]
            assert all(s.preemptions <= crowd.most for s in groups)
        elif not coming:
            break
    else:
        raise AssertionError(f"unfinished: {made.scheduler.stats()}")
    made.check_empty()
    made.engine.shutdown()
    check(made, [r for r in asked if r.params.use_beam_search and r.id not in gone])
    pool = made.scheduler.blocks.usable * crowd.block_size
    for each in asked:
        if each.params.use_beam_search or each.id in gone:
            continue
        for index in range(each.params.width):
            wanted = expected_tokens(each, index, LONGEST, pool)
            assert made.tokens[each.id, index] == wanted, (each.id, index)
    return made


def count(crowd: Crowd, made: Rig) -> None:
    ends = [end for (_, i), end in made.finished.items() if i == 0 and end.score is not None]
    times = [end.timings.num_preemptions for end in ends if end.timings is not None]
    _seen["crowds"] += 1
    _seen["group preemptions"] += sum(times)
    _seen["firm"] += sum(each >= crowd.most for each in times)
    _seen["preemptions"] += made.scheduler.stats().preemptions
    _seen["copies"] += made.runner.copies
    _seen["lanes"] += bool(made.runner.limits.lanes)


some = settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


# A group behind single ones, which would be preempted a second time did it not wait for them.
WAITS = Crowd(
    seed=0, block_size=1, slack=0, max_num_seqs=4, budget=16, chunk_multiple=1, prefix_caching=False, rest=0,
    lanes=False, aborts=False, priorities=False, most=1, shape="behind",
)  # fmt: skip


@some
@example(WAITS)
@given(crowds)
def test_any_crowd_of_groups(crowd: Crowd) -> None:
    count(crowd, play(crowd))


def test_the_crowds_were_hard() -> None:
    if not _seen["crowds"]:
        pytest.skip("counts what the test above did in the same run")
    assert _seen["group preemptions"] >= 20 and _seen["firm"] >= 10, _seen
    assert min(_seen["copies"], _seen["preemptions"]) >= 60 and _seen["lanes"] >= 20, _seen
    assert _seen["refused"] >= 1, _seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(some, max_examples=2000)
@given(crowds)
def test_very_many_crowds(crowd: Crowd) -> None:
    play(crowd)


def test_groups_that_may_need_the_whole_pool_all_end() -> None:
    """Each may hold all of it alone; together they take it from each other a bounded number of times."""
    made = rig(
        blocks=1 + 26, block_size=2, max_num_seqs=16, prefix_caching=False, runner=BeamRunner
    )
    asked = [beams(name, 4, 4, max_tokens=13, ignore_eos=True) for name in "abcd"]
    assert largest(2, asked[0]) == 26
    for each in asked:
        made.engine.add(each)
    made.run(200)
    check(made, asked)
    assert made.scheduler.stats().preemptions > 0
    made.check_empty()
