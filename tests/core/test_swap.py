"""Blocks that go to host memory and come back: what is kept, when, and that nothing is computed twice."""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenarios import Scenario, play, random_lanes, random_scenario
from support import Rig, expected_tokens, request, rig
from test_scheduler_properties import scenarios

from octavo.core.blocks import BlockManager, extend_hashes, root_hash
from octavo.core.contract import Lane
from octavo.core.host_pool import HostPool
from octavo.core.sequence import Sequence
from octavo.core.swap import Swap
from octavo.core.types import Request, StepPlan

POOL = 10**6


def right(r: Rig, *requests: Request) -> None:
    """That each of these gave what it gives alone."""
    for q in requests:
        for i in range(q.params.n):
            assert r.tokens[q.id, i] == expected_tokens(q, i, 4096, POOL), (q.id, i)


def crowded(**options: object) -> tuple[Rig, list[Request]]:
    """Five requests that need thirty blocks of a pool of twelve."""
    r = rig(blocks=13, block_size=4, **options)  # type: ignore[arg-type]
    requests = [request(str(i), 9 + i, max_tokens=12) for i in range(5)]
    for q in requests:
        r.engine.add(q)
    return r, requests


@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_sequence_computes_nothing_twice(caching: bool) -> None:
    r, requests = crowded(host=40, prefix_caching=caching)
    plans: list[StepPlan] = []
    r.runner.hook = plans.append
    r.run()
    right(r, *requests)
    r.check_empty()
    stats = r.scheduler.stats()
    assert stats.swaps == stats.preemptions > 0
    computed = sum(plan.num_tokens for plan in plans)
    assert computed == sum(len(q.prompt_token_ids) + 11 for q in requests)
    timings = [r.finished[q.id, 0].timings for q in requests]
    assert sum(t.num_swaps for t in timings if t) == stats.swaps
    assert not any(t.num_recomputed_tokens for t in timings if t)
    assert stats.swapped_in_blocks > 0 and stats.host_blocks_total == 40


def test_without_room_on_the_host_a_sequence_is_computed_again() -> None:
    r, requests = crowded(host=1)
    r.run()
    right(r, *requests)
    r.check_empty()
    stats = r.scheduler.stats()
    assert stats.swaps < stats.preemptions
    timings = [r.finished[q.id, 0].timings for q in requests]
    assert any(t.num_recomputed_tokens for t in timings if t)


def test_blocks_that_stay_cached_on_the_device_are_not_copied() -> None:
    """Preempted, and back before anybody wanted its full blocks: only the last, partial one travelled."""
    r = rig(blocks=100, block_size=4, host=40)
    q = request("a", 21, max_tokens=10)
    r.engine.add(q)
    for _ in range(3):
        r.step()
    (sequence,) = r.scheduler.running
    r.scheduler.roster.preempt(sequence)
    assert r.scheduler.stats().host_blocks_pinned == 6  # five are promised
    r.scheduler.check()
    r.run()
    right(r, q)
    stats = r.scheduler.stats()
    assert (stats.swapped_out_blocks, stats.swapped_in_blocks) == (1, 1)
    r.check_empty()


def test_samples_share_what_waits_for_them() -> None:
    """Two samples of a prompt of six blocks, both preempted: its full blocks have one slot each, its last
    one, which both were about to write into, one for either."""
    r = rig(blocks=100, block_size=4, host=40)
    q = request("a", 22, max_tokens=10, n=2, temperature=1.0, seed=5)
    r.engine.add(q)
    r.step()
    for sequence in list(r.scheduler.running):
        r.scheduler.roster.preempt(sequence)
    assert r.scheduler.stats().host_blocks_pinned == 5 + 2
    r.scheduler.check()
    r.run()
    right(r, q)
    r.check_empty()


def test_the_cheaper_way_is_taken() -> None:
    for block_seconds, swaps in ((1.0, True), (100.0, False)):
        r, requests = crowded(host=40, mode="auto", block_seconds=block_seconds)
        swap = r.scheduler.swap
        assert swap is not None
        swap.observe = lambda plan, seconds: None  # type: ignore[method-assign]
        swap.token_seconds = 2.0
        r.run()
        right(r, *requests)
        stats = r.scheduler.stats()
        assert (stats.swaps > 0) == swaps and stats.preemptions > 0
        assert (stats.swapped_out_blocks > 0) == swaps  # nor is the cache's second level worth it


def test_what_a_prompts_token_costs_is_learned_from_steps_with_prompts() -> None:
    r = rig(host=4, mode="auto")
    swap = r.scheduler.swap
    assert swap is not None
    r.engine.add(request("a", 100, max_tokens=3))
    plan = r.scheduler.schedule()
    assert plan is not None
    swap.observe(plan, 2.0)
    assert swap.token_seconds == pytest.approx(0.02)
    swap.observe(plan, 4.0)
    assert swap.token_seconds == pytest.approx(0.024)
    r.scheduler.commit(plan, r.runner.execute(plan))
    decoding = r.scheduler.schedule()
    assert decoding is not None and decoding.num_tokens == 1
    swap.observe(decoding, 9.0)
    assert swap.token_seconds == pytest.approx(0.024)


def test_recompute_keeps_the_second_level_only() -> None:
    r, requests = crowded(host=40, mode="recompute")
    r.run()
    right(r, *requests)
    stats = r.scheduler.stats()
    assert stats.swaps == 0 < stats.preemptions
    assert stats.swapped_out_blocks > 0
    r.check_empty()


# ------------------------------------------------------------------------ the cache's second level


def two_prompts_by_turns(host: int, blocks: int = 9) -> tuple[Rig, list[int]]:
    """Two prompts of seven blocks by turns in a pool that holds one; the cached tokens of each."""
    r = rig(blocks=blocks, block_size=4, host=host)
    common = request("x", 28).prompt_token_ids
    other = request("y", 28).prompt_token_ids
    cached = []
    for i in range(4):
        prompt = [common, other][i % 2]
        r.engine.add(request(str(i), prompt, max_tokens=3))
        r.run()
        assert r.tokens[str(i), 0] == expected_tokens(
            request(str(i), prompt, max_tokens=3), 0, 4096, POOL
        )
        cached.append(r.finished[str(i), 0].num_cached_tokens)
    r.check_empty()
    return r, cached


def test_evicted_blocks_come_back_from_the_host() -> None:
    r, cached = two_prompts_by_turns(host=20)
    assert cached == [0, 0, 24, 24]  # the last token is always computed
    stats = r.scheduler.stats()
    assert stats.host_hit_tokens > 0 and stats.prefix_hit_tokens == 48
    assert sum(stats.prefix_miss_tokens.values()) == 4 * 28 - 48
    assert stats.prefix_miss_tokens["evicted"] == 0
    assert r.finished["2", 0].timings.cache_miss == "below_block"  # type: ignore[union-attr]


def test_what_both_levels_lost_counts_as_evicted() -> None:
    r, cached = two_prompts_by_turns(host=1)
    assert max(cached) < 24
    assert r.scheduler.stats().prefix_miss_tokens["evicted"] > 0


def test_salts_are_apart_on_the_host_too() -> None:
    r = rig(blocks=9, block_size=4, host=20)
    prompt = request("x", 28).prompt_token_ids
    for name, salt in (("a", "a"), ("b", "b"), ("c", "a")):
        r.engine.add(request(name, prompt, max_tokens=2, cache_salt=salt))
        r.run()
    assert [r.finished[name, 0].num_cached_tokens for name in "abc"] == [0, 0, 24]


# --------------------------------------------------------------------------------- what goes wrong


def test_a_step_that_fails_brings_nothing_that_could_be_found() -> None:
    """Its copies may not have been made: neither those from the host nor those to it."""
    r = rig(blocks=9, block_size=4, host=20)
    first, second = request("x", 28).prompt_token_ids, request("y", 28).prompt_token_ids
    for name, prompt in (("a", first), ("b", second)):
        r.engine.add(request(name, prompt, max_tokens=2))
        r.run()

    def fail(plan: StepPlan) -> None:
        if plan.swap_in:
            raise RuntimeError("out of luck")

    r.runner.hook = fail
    r.engine.add(request("c", first, max_tokens=2))
    r.run()
    assert r.finished["c", 0].finish_reason == "error"
    r.runner.hook = None
    for name, prompt in (("d", first), ("e", second), ("f", first)):
        r.engine.add(request(name, prompt, max_tokens=2))
        r.run()
        assert r.tokens[name, 0] == expected_tokens(
            request(name, prompt, max_tokens=2), 0, 4096, POOL
        )
    r.check_empty()


def test_a_lost_cache_leaves_what_is_on_the_host() -> None:
    r = rig(blocks=9, block_size=4, host=20)
    first, second = request("x", 28).prompt_token_ids, request("y", 28).prompt_token_ids
    for name, prompt in (("a", first), ("b", second)):
        r.engine.add(request(name, prompt, max_tokens=2))
        r.run()
    r.runner.kv[:] = 0
    r.scheduler.restart()
    r.engine.add(request("c", first, max_tokens=2))
    r.run()
    assert r.finished["c", 0].num_cached_tokens > 0
    assert r.tokens["c", 0] == expected_tokens(request("c", first, max_tokens=2), 0, 4096, POOL)


def test_who_ends_while_swapped_out_leaves_nothing_behind() -> None:
    r = rig(blocks=100, block_size=4, host=40)
    for name in "ab":
        r.engine.add(request(name, 22, max_tokens=10))
    for _ in range(3):
        r.step()
    for sequence in list(r.scheduler.running):
        r.scheduler.roster.preempt(sequence)
    assert r.scheduler.stats().host_blocks_pinned == 12
    r.take(r.engine.abort(["a"]))
    r.scheduler.check()
    assert r.scheduler.stats().host_blocks_pinned == 6
    r.run()
    right(r, request("b", 22, max_tokens=10))
    r.check_empty()


def test_what_was_to_be_copied_from_a_lost_cache_is_computed_again() -> None:
    r = rig(blocks=100, block_size=4, host=40, prefix_caching=False)
    q = request("a", 22, max_tokens=10)
    r.engine.add(q)
    for _ in range(3):
        r.step()
    r.scheduler.roster.preempt(r.scheduler.running[0])
    r.runner.kv[:] = 0
    r.scheduler.restart()
    r.run()
    right(r, q)
    r.check_empty()


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_one_alone_goes_on_in_the_lane_that_decodes(steps: int) -> None:
    """Prompts are computed whole in a lane of their own; whichever has its turn, the next step runs it."""
    lanes = (
        Lane(("prefill",), 4, 64, exclusive=True, chunked=False),
        Lane(("decode",), 8, 8, exclusive=True),
    )
    r = rig(blocks=100, block_size=4, max_num_seqs=8, host=40, lanes=lanes)
    q = request("a", 22, max_tokens=10)
    r.engine.add(q)
    for _ in range(steps):
        r.step()
    r.scheduler.roster.preempt(r.scheduler.running[0])
    assert r.step()
    r.run()
    right(r, q)
    assert r.scheduler.stats().swapped_in_blocks == r.scheduler.stats().swapped_out_blocks > 0
    r.check_empty()


# --------------------------------------------------------------------------------- within one plan


def books(blocks: int, host: int) -> tuple[BlockManager, Swap]:
    manager = BlockManager(blocks, 4)
    return manager, Swap(manager, HostPool(host), "swap", 0.0)


def holder(manager: BlockManager, tokens: int, name: str = "a") -> Sequence:
    """A sequence whose tokens are computed and whose full blocks are known."""
    q = request(name, tokens)
    sequence = Sequence(q, 0, root_hash(None, None, ()), 0, 100)
    sequence.add_blocks(manager.allocate(manager.blocks_for(tokens)))
    sequence.num_computed = tokens
    extend_hashes(sequence.hashes, sequence.root, sequence.tokens, 4)
    for block, key in zip(sequence.blocks, sequence.hashes, strict=False):
        manager.remember(block, key)
    sequence.num_remembered = tokens // 4
    return sequence


def give_up(manager: BlockManager, swap: Swap, sequence: Sequence) -> None:
    swap.leaving(sequence)
    manager.free(sequence.blocks)
    sequence.drop_blocks()


def test_a_block_whose_known_twin_has_gone_is_known_itself() -> None:
    manager, swap = books(blocks=4, host=4)
    first, twin = holder(manager, 4), holder(manager, 5)
    assert manager.lookup(twin.hashes) == first.blocks
    give_up(manager, swap, first)
    manager.free(manager.allocate(1))  # evicts it
    swap.take_copies()
    for slot in [swap.pool.find(twin.hashes[0])]:
        assert slot is not None
        swap.pool.void(slot)
    assert swap.out(twin)
    assert manager.lookup(twin.hashes) == twin.blocks[:1]


def test_what_goes_again_in_the_plan_in_which_it_came_is_not_copied_over_its_successor() -> None:
    manager, swap = books(blocks=4, host=4)
    sequence = holder(manager, 10)
    assert swap.out(sequence)
    give_up(manager, swap, sequence)
    others = manager.allocate(3)  # evicts both full blocks
    assert len(swap.take_copies()[0]) == 3
    manager.free(others)
    places = swap.waiting_places(sequence)
    assert len(places) == 3 and max(places) < 0
    sequence.add_blocks(swap.bring(sequence, places, 2))
    assert not swap.out(sequence)  # nothing is there yet that could be copied
    give_up(manager, swap, sequence)
    assert len(manager.allocate(3)) == 3
    assert swap.take_copies() == ((), ())
    swap.begin_step()
    assert [swap.pool.find(key) is not None for key in sequence.hashes] == [True, True]
    swap.check([])


# ------------------------------------------------------------------------------------- all together

_seen: Counter[str] = Counter()

thorough = settings(
    max_examples=35,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def count(r: Rig) -> None:
    stats = r.scheduler.stats()
    for name in ("swaps", "swapped_out_blocks", "swapped_in_blocks", "host_hit_tokens"):
        _seen[name] += getattr(stats, name)
    _seen["recomputed"] += stats.preemptions - stats.swaps
    _seen["losses"] += r.runner.losses


@thorough
@given(
    scenarios(),
    st.sampled_from([1, 3, 10, 100]),
    st.sampled_from(["swap", "swap", "auto", "recompute"]),
)
def test_any_scenario_beside_host_memory(scenario: Scenario, host: int, mode: str) -> None:
    count(play(replace(scenario, host=host, mode=mode))[1])


@thorough
@given(scenarios(crowd=True), st.sampled_from([3, 100]))
def test_any_crowd_beside_host_memory(scenario: Scenario, host: int) -> None:
    count(play(replace(scenario, host=host))[1])


@thorough
@given(scenarios(), st.randoms(use_true_random=False), st.sampled_from([3, 100]))
def test_any_lanes_beside_host_memory(scenario: Scenario, dice: random.Random, host: int) -> None:
    count(play(replace(random_lanes(dice, scenario), host=host))[1])


def test_blocks_did_move() -> None:
    """The properties above are worth something only if what they are about did happen."""
    if not _seen:
        pytest.skip("counts what the tests above did in the same run")
    assert _seen["swaps"] >= 50 and _seen["losses"] >= 20 and _seen["recomputed"] >= 5, _seen
    assert all(
        _seen[name] >= 100
        for name in ("swapped_out_blocks", "swapped_in_blocks", "host_hit_tokens")
    ), _seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_steps_beside_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="octavo")  # else pytest keeps every step's traceback
    done = number = 0
    while done < 300_000:
        dice = random.Random(77 * 1_000_003 + number)
        scenario = random_scenario(dice)
        if number % 2:
            scenario = random_lanes(dice, scenario)
        scenario = replace(
            scenario,
            host=dice.choice([1, 2, 5, 20, 200]),
            mode=dice.choice(["swap", "swap", "recompute"]),
        )
        try:
            done += play(scenario)[0]
        except BaseException as error:
            error.add_note(f"number {number}: {scenario}")
            raise
        number += 1
