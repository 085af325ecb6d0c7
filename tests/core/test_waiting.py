"""Waiting for a prefix that another is computing: who waits, how long, and what ends it."""

from __future__ import annotations

from typing import Any

import pytest
from support import Rig, expected_tokens, request, rig

from octavo.core.engine import Engine
from octavo.core.types import StepPlan, StepResult
from octavo.core.waiting import MAX_PREFIX_WAITS

PREFIX = list(range(100, 164))  # 16 blocks of 4


Step = list[tuple[str, int, int]]


def watch(r: Rig) -> list[Step]:
    """(request, start, count) of every item of every step to come, prompts only."""
    steps: list[Step] = []

    def see(plan: StepPlan) -> None:
        steps.append([])
        for item in plan.items:
            end = min(item.start + item.count, item.sequence.num_prompt)
            if end > item.start:
                steps[-1].append((item.sequence.request.id, item.start, end - item.start))

    r.runner.hook = see
    return steps


def add(r: Rig, name: str, prompt: list[int], **params: Any) -> None:
    r.engine.add(request(name, prompt, **{"max_tokens": 3, **params}))


def prefilled(steps: list[Step]) -> int:
    return sum(count for step in steps for _, _, count in step)


def begin(r: Rig) -> tuple[StepPlan, StepResult]:
    """A step up to where its result would be taken: waiters still wait."""
    plan = r.scheduler.schedule()
    assert plan is not None
    return plan, r.runner.execute(plan)


def end(r: Rig, begun: tuple[StepPlan, StepResult]) -> None:
    r.scheduler.check()
    r.take(r.scheduler.commit(*begun))
    r.scheduler.check()


def parked(r: Rig) -> set[str]:
    return {s.request.id for s in r.scheduler.sequences() if s.parked_for is not None}


def right(r: Rig) -> None:
    """Everyone put out what it puts out alone, and nothing is left behind."""
    r.check_empty()
    queue = r.scheduler.roster.waiting
    assert not len(queue) and not queue._promises and not queue._parked


@pytest.mark.parametrize("budget", [64, 512, 1500, 4096])
def test_a_cold_prefix_of_many_is_computed_once(budget: int) -> None:
    r = rig(budget=budget)
    steps = watch(r)
    shared = list(range(1024 // 2)) * 2
    requests = [
        request(str(i), [*shared, *range(i, 32 + i)], max_tokens=4, ignore_eos=True)
        for i in range(32)
    ]
    for q in requests:
        r.engine.add(q)
    r.run()
    assert prefilled(steps) == 1024 + 32 * 32
    assert r.scheduler.stats().prefix_hit_tokens == 31 * 1024
    assert r.scheduler.stats().prefix_waits <= 31
    for q in requests:
        assert r.tokens[q.id, 0] == expected_tokens(q, 0, 4096, 10**6)
    right(r)


def test_equal_prompts_share_all_but_the_block_of_the_last_token() -> None:
    r = rig(block_size=4)
    steps = watch(r)
    for name in "abc":
        add(r, name, PREFIX)
    begun = begin(r)
    assert steps == [[("a", 0, 64)]] and parked(r) == {"b", "c"}
    stats = r.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_for_prefix) == (1, 2, 2)
    end(r, begun)
    assert not parked(r)
    r.run()
    assert steps[1] == [("b", 60, 4), ("c", 60, 4)]
    assert r.scheduler.stats().prefix_waits == 2
    right(r)


# A budget of 40 in chunks of 32: a prompt advances by 32 tokens a step, and room for 8 is left over.
CHUNKS = {"block_size": 4, "budget": 40, "chunk_multiple": 32}


def test_it_waits_for_the_last_shared_block_and_starts_once() -> None:
    r = rig(**CHUNKS)
    steps = watch(r)
    add(r, "a", [*PREFIX, *range(40)])
    add(r, "b", [*PREFIX, 1, 2])
    r.step()
    assert parked(r) == {"b"}  # though half of what it shares is there
    r.step()
    assert not parked(r)
    r.run()
    assert [item for step in steps for item in step if item[0] == "b"] == [("b", 64, 2)]
    right(r)


def test_a_waiter_keeps_its_place_and_others_pass_only_meanwhile() -> None:
    r = rig(block_size=4, max_num_seqs=2)
    steps = watch(r)
    add(r, "a", PREFIX, max_tokens=2)
    add(r, "waits", [*PREFIX, 1], max_tokens=2)
    add(r, "passes", [7] * 9, max_tokens=2)
    add(r, "later", [8] * 9, max_tokens=2)
    begun = begin(r)
    assert {name for name, _, _ in steps[0]} == {"a", "passes"} and parked(r) == {"waits"}
    end(r, begun)
    r.run()
    begun_in_order = [name for step in steps for name, _, _ in step]
    assert begun_in_order == ["a", "passes", "waits", "later"]
    right(r)


def test_one_of_higher_priority_waits_too_and_is_served_first_again() -> None:
    r = rig(**CHUNKS)
    steps = watch(r)
    add(r, "low", PREFIX, priority=1)
    r.step()
    add(r, "high", [*PREFIX, 1, 2, 3], priority=-1)
    add(r, "other", [5] * 3)
    begun = begin(r)
    assert parked(r) == {"high"}
    end(r, begun)
    r.step()
    assert [s.request.id for s in r.scheduler.running] == ["high", "other", "low"]
    r.run()
    assert prefilled(steps) == 64 + 3 + 3
    right(r)


def test_each_waits_only_for_what_it_shares() -> None:
    """b shares 64 tokens with a, c only 8: c starts when those are there."""
    r = rig(**CHUNKS)
    steps = watch(r)
    add(r, "a", [*PREFIX, *range(20)])
    add(r, "b", [*PREFIX, 1])
    add(r, "c", [*PREFIX[:8], 1, 2])
    begun = begin(r)
    assert parked(r) == {"b", "c"}
    end(r, begun)
    assert parked(r) == {"b"}
    r.run()
    assert ("c", 8, 2) in steps[1] and ("b", 64, 1) in steps[2]
    assert prefilled(steps) == 84 + 1 + 2
    right(r)


def test_the_next_segment_is_waited_for_too() -> None:
    """b and c share 64 tokens with a, and 16 more with each other."""
    r = rig(block_size=4)
    steps = watch(r)
    add(r, "a", [*PREFIX, 1])
    add(r, "b", [*PREFIX, *range(16), 2])
    add(r, "c", [*PREFIX, *range(16), 3])
    r.run()
    assert prefilled(steps) == 65 + 17 + 1
    assert r.finished["c", 0].num_cached_tokens == 80
    assert r.scheduler.stats().prefix_waits == 3
    right(r)


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "x"},
        {"adapter": "x"},
        {"image_hashes": (b"x" * 32,)},
        {"prompt_logprobs": 0},
    ],
)
def test_what_cannot_be_shared_is_not_waited_for(fields: dict[str, Any]) -> None:
    for first, second in (({}, fields), (fields, {})):
        r = rig(block_size=4)
        add(r, "a", PREFIX, **first)
        add(r, "b", PREFIX, **second)
        begun = begin(r)
        assert not parked(r) and len(r.scheduler.running) == 2
        end(r, begun)
        r.run()
        right(r)


def test_same_salt_is_waited_for() -> None:
    r = rig(block_size=4)
    for name in "ab":
        add(r, name, PREFIX, cache_salt="x")
    begin(r)
    assert parked(r) == {"b"}


def test_without_a_prefix_cache_nobody_waits() -> None:
    r = rig(block_size=4, prefix_caching=False)
    steps = watch(r)
    for name in "ab":
        add(r, name, PREFIX)
    r.run()
    assert len(steps[0]) == 2 and r.scheduler.stats().prefix_waits == 0
    right(r)


def test_less_than_a_block_in_common_is_not_waited_for() -> None:
    r = rig(block_size=4)
    add(r, "a", [1, 2, 3, 9, 9, 9])
    add(r, "b", [1, 2, 3, 8, 8, 8])
    add(r, "c", [1, 2, 3, 9])  # a's block, but c's last token is in it
    begin(r)
    assert len(r.scheduler.running) == 3


# ------------------------------------------------------------------- what ends a wait too early


def test_the_maker_is_aborted_between_two_steps() -> None:
    r = rig(**CHUNKS)
    steps = watch(r)
    for name in "abc":
        add(r, name, PREFIX)
    r.step()
    assert parked(r) == {"b", "c"}
    r.take(r.engine.abort(["a"]))
    assert not parked(r)
    r.run()
    own = [item for step in steps for item in step if item[0] != "a"]
    assert own == [("b", 32, 32), ("c", 60, 4)]  # b takes up where a ended, c waits for b
    right(r)


def test_the_maker_is_aborted_while_its_step_runs() -> None:
    r = rig(block_size=4)
    steps = watch(r)
    for name in "abc":
        add(r, name, PREFIX)
    begun = begin(r)
    r.take(r.engine.abort(["a"]))
    assert not parked(r)
    end(r, begun)
    r.run()
    assert prefilled(steps[1:]) == 64 + 4
    right(r)


def test_the_maker_is_preempted_and_is_first_to_come_back() -> None:
    r = rig(**CHUNKS)
    steps = watch(r)
    add(r, "a", PREFIX)
    add(r, "b", [*PREFIX, 1])
    r.step()
    (maker,) = r.scheduler.running
    assert maker.request.id == "a" and parked(r) == {"b"}
    r.scheduler.roster.preempt(maker)
    assert not parked(r)
    r.scheduler.check()
    r.run()
    assert [item for step in steps[1:] for item in step] == [("a", 32, 32), ("b", 64, 1)]
    assert r.finished["b", 0].num_cached_tokens == 64
    right(r)


class Failing:
    """Fails the steps it is told to."""

    def __init__(self, r: Rig, at: set[int]) -> None:
        self.r, self.at, self.close = r, at, r.runner.close

    def execute(self, step: StepPlan) -> StepResult:
        if step.step in self.at:
            raise RuntimeError("out of luck")
        return self.r.runner.execute(step)

    compilations = 0

    def recover(self) -> bool:
        return False


def test_the_makers_step_fails() -> None:
    r = rig(block_size=4)
    r.engine = Engine(r.scheduler, Failing(r, {1}), r.engine.info)
    steps = watch(r)
    for name in "abc":
        add(r, name, PREFIX)
    r.step()
    assert r.finished["a", 0].finish_reason == "error" and not parked(r)
    r.run()
    assert prefilled(steps) == 64 + 4
    assert [r.finished[name, 0].finish_reason for name in "bc"] == ["length"] * 2
    right(r)


def test_waits_are_bounded() -> None:
    """Every maker fails: who has waited often enough computes for itself."""
    r = rig(block_size=4)
    r.engine = Engine(r.scheduler, Failing(r, set(range(1, 9))), r.engine.info)
    for i in range(9):
        add(r, str(i), PREFIX)
    while r.engine.has_unfinished():
        r.step()
    errors = [i for i in range(9) if r.finished[str(i), 0].finish_reason == "error"]
    assert errors == list(range(9))  # one, one, one, then all that are left at once
    assert r.scheduler.stats().steps == MAX_PREFIX_WAITS + 1
    right(r)


def test_a_waiter_is_aborted() -> None:
    r = rig(block_size=4)
    for name in "abc":
        add(r, name, PREFIX)
    add(r, "n", PREFIX, n=3, seed=1, temperature=1)
    begun = begin(r)
    r.take(r.engine.abort(["b", ("n", 1)]))
    assert parked(r) == {"c", "n"}
    r.scheduler.check()
    r.take(r.engine.abort(["c"]))
    end(r, begun)
    r.run()
    assert [len(r.tokens["n", i]) for i in range(3)] == [3, 0, 3]
    right(r)


def test_who_has_waited_and_finds_no_room_is_not_passed() -> None:
    r = rig(blocks=1 + 22, block_size=4)
    steps = watch(r)
    add(r, "a", PREFIX, max_tokens=8)
    add(r, "b", [*PREFIX, *range(20)], max_tokens=4)
    r.step()
    add(r, "small", [3] * 4, max_tokens=2)
    r.run()
    assert [name for step in steps for name, _, _ in step] == ["a", "b", "small"]
    right(r)


def test_what_was_waited_for_may_be_gone_again() -> None:
    """The maker ends, and its blocks are taken for something else before the waiter can start."""
    r = rig(blocks=1 + 18, block_size=4)
    add(r, "a", PREFIX, max_tokens=1)
    add(r, "b", [*PREFIX, 1], max_tokens=2)
    r.step()
    assert r.scheduler.stats().prefix_waits == 1 and not r.scheduler.running
    taken = r.scheduler.blocks.allocate(r.scheduler.blocks.num_free)
    r.scheduler.blocks.free(taken)
    assert r.scheduler.blocks.num_cached == 0
    r.run()
    assert len(r.tokens["b", 0]) == 2 and r.finished["b", 0].num_cached_tokens == 0
    right(r)


# --------------------------------------------------------------------------------- many of them


def test_a_step_looks_behind_so_many_waiters_and_no_further() -> None:
    r = rig(block_size=4, max_num_seqs=200, rows=1024)
    for i in range(100):
        add(r, str(i), [*PREFIX, i])
    add(r, "other", [9] * 9)
    begun = begin(r)
    assert len(parked(r)) == 32 and r.scheduler.stats().waiting == 100
    end(r, begun)
    r.run()
    assert r.scheduler.stats().prefix_hit_tokens == 99 * 64
    right(r)


def test_aborted_waiters_are_cleared_from_the_queue() -> None:
    r = rig(max_num_seqs=1)
    add(r, "first", [1] * 5, max_tokens=50)
    r.step()
    for i in range(1000):
        add(r, str(i), [2] * 5)
    r.take(r.engine.abort([str(i) for i in range(990)]))
    r.scheduler.check()
    assert len(r.scheduler.roster.waiting._heap) < 100
    r.run()
    assert all(len(r.tokens[str(i), 0]) == 3 for i in range(990, 1000))
    right(r)
