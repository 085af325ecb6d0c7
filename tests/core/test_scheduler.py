"""The scheduler by hand: who runs, who waits, who goes, and what is refused with which numbers."""

from __future__ import annotations

import pytest
from support import Rig, expected_tokens, request, rig

from octavo.core.admission import SchedulerLimits
from octavo.core.blocks import BlockManager
from octavo.core.params import ParamError, RequestRefused
from octavo.core.scheduler import MAX_PREEMPTIONS, Scheduler
from octavo.core.types import StepPlan


def ids(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(i.sequence.request.id, i.start, i.count) for i in plan.items]


def watch(r: Rig) -> list[StepPlan]:
    plans: list[StepPlan] = []
    r.runner.hook = plans.append
    return plans


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        (100, {"max_tokens": 1}, "prompt", "100 tokens; at most 99 fit.*100"),
        (101, {"max_tokens": 0}, "prompt", "101 tokens; at most 100 fit"),
        (10, {"n": 9}, "n", "n=9 needs 9 sequences at once, this engine runs 8"),
        (60, {"max_tokens": 40}, "max_tokens", "needs 7 KV blocks .60 prompt.*has 5"),
        (81, {"max_tokens": 1}, "prompt", "needs 6 KV blocks .*has 5"),
    ],
)
def test_refused_with_numbers(prompt: int, params: dict, param: str, words: str) -> None:
    r = rig(blocks=6, block_size=16, max_model_len=100, max_num_seqs=8)
    with pytest.raises(RequestRefused, match=words) as caught:
        r.engine.add(request("r", prompt, **params))
    assert caught.value.param == param
    r.check_empty()


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [(99, 1), (100, 0), (80, 1), (80, None), (1, 80), (41, 40), (79, 2)],
)
def test_the_largest_that_fits_runs(prompt: int, max_tokens: int | None) -> None:
    """The last output token is never stored, so a pool of 80 slots serves 81 tokens."""
    r = rig(blocks=6 if prompt <= 80 else 20, block_size=16, max_model_len=100)
    r.engine.add(request("r", prompt, max_tokens=max_tokens))
    r.run()
    r.check_empty()
    assert r.finished["r", 0].finish_reason == "length"
    assert len(r.tokens["r", 0]) == (1 if max_tokens is None else max_tokens)


def test_the_same_id_twice_is_refused_while_the_first_runs() -> None:
    r = rig()
    r.engine.add(request("r", 4))
    with pytest.raises(ParamError, match="'r' is in use") as caught:
        r.engine.add(request("r", 4))
    assert caught.value.param == "request_id"
    r.run()
    r.finished.clear()
    r.engine.add(request("r", 4))
    r.run()


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ParamError, match="no tokens"):
        rig().engine.add(request("r", []))


def test_priority_needs_the_policy() -> None:
    r = rig(fcfs_only=True)
    with pytest.raises(ParamError, match="'fcfs'"):
        r.engine.add(request("r", 4, priority=1))
    r.engine.add(request("r", 4))


def test_limits_that_leave_no_row_for_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_logits_rows \(8\) must exceed max_num_seqs \(8\)"):
        SchedulerLimits(8, 8, 8, max_logits_rows=8)


# ------------------------------------------------------------------------------ who runs


def test_decoders_are_served_before_a_long_prompt() -> None:
    r = rig(budget=8)
    plans = watch(r)
    for name in "abc":
        r.engine.add(request(name, 2, max_tokens=10))
    r.step()
    r.engine.add(request("long", 20, max_tokens=1, priority=-1))
    for _ in range(4):
        r.step()
    assert [sorted(c for _, _, c in ids(p)) for p in plans[1:]] == [[1, 1, 1, 5]] * 4


def test_priority_then_arrival() -> None:
    r = rig(max_num_seqs=1)
    plans = watch(r)
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0)):
        r.engine.add(request(name, 3, max_tokens=1, priority=priority))
    r.run()
    assert [ids(p)[0][0] for p in plans] == ["c", "a", "d", "b"]


def test_a_blocked_head_is_not_overtaken() -> None:
    r = rig(blocks=11, block_size=4, budget=100)
    plans = watch(r)
    r.engine.add(request("a", 20, max_tokens=4))
    r.step()
    r.engine.add(request("big", 36, max_tokens=1))
    r.engine.add(request("small", 2, max_tokens=1))
    r.run()
    order = [name for p in plans for name, _, _ in ids(p)]
    assert order.index("small") > order.index("big")
    r.check_empty()


def test_chunks_are_multiples() -> None:
    r = rig(budget=10, chunk_multiple=4)
    plans = watch(r)
    r.engine.add(request("a", 21, max_tokens=1))
    r.run()
    assert [ids(p) for p in plans] == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 5)]]


def test_n_waits_for_all_its_places() -> None:
    r = rig(max_num_seqs=4)
    plans = watch(r)
    r.engine.add(request("a", 2, max_tokens=3, n=2, seed=1, temperature=1))
    r.engine.add(request("b", 2, max_tokens=3, n=3, seed=1, temperature=1))
    r.run()
    assert all(len({i.sequence.request.id for i in p.items}) == 1 for p in plans)


def test_prompt_rows_and_draws_share_the_rows_of_a_step() -> None:
    r = rig(max_num_seqs=4, rows=6)
    plans = watch(r)
    for name in "abc":
        r.engine.add(request(name, 2, max_tokens=30))
    r.step()
    r.engine.add(request("p", 9, max_tokens=1, prompt_logprobs=0))
    r.run()
    chunks = [i.count for p in plans for i in p.items if i.sequence.request.id == "p"]
    assert chunks == [2, 2, 2, 2, 1]  # 6 rows, less 3 decoders and its own draw


def test_a_preempted_decoder_claims_no_budget() -> None:
    """Five samples, three tokens a step, and a prompt that may not be preempted holds the pool."""
    r = rig(blocks=13, block_size=4, budget=3, max_num_seqs=8, prefix_caching=False)
    r.engine.add(request("f", 4, n=5, seed=1, temperature=1, max_tokens=9, priority=-1))
    r.step()
    r.engine.add(request("m", 40, max_tokens=1))
    r.step()
    (prompt,) = (s for s in r.scheduler.sequences() if s.request.id == "m")
    assert prompt.running and len(r.scheduler.running) == 6
    prompt.preemptions = MAX_PREEMPTIONS
    taken = r.scheduler.blocks.allocate(r.scheduler.blocks.num_free)
    plan = r.scheduler.schedule()
    assert plan is not None and ids(plan) == [("m", 2, 3)]
    r.scheduler.commit(plan, r.runner.execute(plan))
    r.scheduler.blocks.free(taken)
    r.scheduler.check()
    r.run()
    r.check_empty()


# ---------------------------------------------------------------------------- preemption


def test_the_last_in_order_goes_first_and_comes_back() -> None:
    r = rig(blocks=6, block_size=4, prefix_caching=False)
    requests = [request(name, 3, max_tokens=14) for name in "ab"]
    for q in requests:
        r.engine.add(q)
    r.run()
    assert r.scheduler.stats().preemptions >= 1
    a, b = (r.finished[name, 0].timings for name in "ab")
    assert a is not None and b is not None
    assert a.num_preemptions == 0 and b.num_preemptions >= 1
    assert b.num_recomputed_tokens > 0
    for q in requests:
        assert r.tokens[q.id, 0] == expected_tokens(q, 0, 4096, 20)


def test_preemption_recovers_its_own_cached_blocks() -> None:
    r = rig(blocks=7, block_size=4)
    for name in "ab":
        r.engine.add(request(name, 7, max_tokens=12))
    r.run()
    timings = r.finished["b", 0].timings
    assert timings is not None and timings.num_preemptions >= 1
    assert timings.num_cached_tokens == 0  # what it took back was its own, not a hit
    assert r.scheduler.stats().prefix_hit_tokens == 0


def test_preemptions_are_bounded_in_a_crowd() -> None:
    r = rig(blocks=12, block_size=4, budget=64)
    for i in range(20):
        r.engine.add(request(str(i), 5 + i % 7, max_tokens=30))
    r.run()
    assert r.worst_preemptions <= MAX_PREEMPTIONS + 1
    assert r.scheduler.stats().preemptions >= 10
    r.check_empty()


def test_admission_leaves_each_neighbour_a_block_to_grow_into() -> None:
    r = rig(blocks=1 + 12, block_size=4, prefix_caching=False)
    for name in "ab":
        r.engine.add(request(name, 12, max_tokens=8))
    r.step()
    r.step()
    r.engine.add(
        request("c", 12, max_tokens=4)
    )  # 3 of 4 free blocks, and a and b will want one each
    r.step()
    assert [s.request.id for s in r.scheduler.running] == ["a", "b"]
    r.run()
    assert r.scheduler.stats().preemptions == 0


# ------------------------------------------------------------------------------- sharing


def test_a_prefix_hit_skips_full_blocks_but_never_the_last_token() -> None:
    r = rig(block_size=4)
    plans = watch(r)
    prompt = list(range(12))
    for name in ("a", "b", "c"):
        r.engine.add(request(name, prompt if name != "c" else [*prompt, 99], max_tokens=1))
        r.run()
    assert [ids(p)[0][1:] for p in plans] == [(0, 12), (8, 4), (12, 1)]
    assert [r.finished[name, 0].num_cached_tokens for name in "abc"] == [0, 8, 12]
    assert r.scheduler.stats().prefix_hit_tokens == 20


def test_output_is_cached_too() -> None:
    r = rig(block_size=4)
    r.engine.add(request("a", 4, max_tokens=9))
    r.run()
    again = [*request("a", 4).prompt_token_ids, *r.tokens["a", 0], 5]
    r.engine.add(request("b", again, max_tokens=1))
    r.run()
    assert r.finished["b", 0].num_cached_tokens == 12


def test_salt_and_adapter_and_images_isolate() -> None:
    r = rig(block_size=4)
    prompt = list(range(17))
    wanted = [
        ({"cache_salt": "a"}, 0),
        ({"cache_salt": "a"}, 16),
        ({"cache_salt": "b"}, 0),
        ({}, 0),
        ({}, 16),
        ({"adapter": "a"}, 0),
        ({"adapter": "a", "cache_salt": "bc"}, 0),
        ({"adapter": "ab", "cache_salt": "c"}, 0),
        ({"image_hashes": (b"\0" * 31 + b"\1",)}, 0),
        ({"image_hashes": (b"\1" + b"\0" * 31,)}, 0),
        ({"adapter": "a"}, 16),
    ]
    for i, (fields, cached) in enumerate(wanted):
        r.engine.add(request(str(i), prompt, max_tokens=2, **fields))
        r.run()
        assert r.finished[str(i), 0].num_cached_tokens == cached, (i, fields)


def test_forks_share_until_they_write() -> None:
    r = rig(block_size=4, max_num_seqs=8)
    q = request("f", 6, n=4, seed=3, temperature=1, max_tokens=7)
    r.engine.add(q)
    r.step()
    assert r.scheduler.blocks.num_used == 2
    r.step()
    assert r.runner.copies == 3  # the last to write has the block for itself
    assert r.scheduler.blocks.num_used == 5
    r.run()
    outputs = [r.tokens["f", i] for i in range(4)]
    assert outputs == [expected_tokens(q, i, 4096, 10**6) for i in range(4)]
    assert len({tuple(o) for o in outputs}) == 4
    r.check_empty()


def test_a_full_last_block_is_shared_without_copies() -> None:
    r = rig(block_size=4, max_num_seqs=8)
    r.engine.add(request("f", 8, n=3, seed=3, temperature=1, max_tokens=3))
    r.run()
    assert r.runner.copies == 0


# -------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_whole_request_ends_at_once(when: str, n: int) -> None:
    r = rig(budget=4 if when == "prefilling" else 64)
    if when == "waiting":
        r = rig(max_num_seqs=3)
        r.engine.add(request("first", 4, n=3, seed=1, temperature=1, max_tokens=5))
        r.step()
    r.engine.add(request("r", 9, n=n, seed=1, temperature=1, max_tokens=50))
    for _ in range({"waiting": 1, "prefilling": 2, "decoding": 4}[when]):
        r.step()
    updates = r.engine.abort(["r"])
    assert sorted((u.request_id, u.index, u.finish_reason) for u in updates) == [
        ("r", i, "abort") for i in range(n)
    ]
    assert r.engine.abort(["r", ("r", 0), "nobody"]) == []
    r.scheduler.check()
    r.run()
    r.check_empty()
    assert r.scheduler.stats().finished["abort"] == 1


@pytest.mark.parametrize("gone", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [2, 0, 1]])
@pytest.mark.parametrize("prompt", [9, 40])
def test_samples_can_go_before_they_are_forked(gone: list[int], prompt: int) -> None:
    r = rig(budget=16)
    q = request("r", prompt, n=3, seed=1, temperature=1, max_tokens=6)
    r.engine.add(q)
    if prompt == 40:
        r.step()
    for index in gone:
        (update,) = r.engine.abort([("r", index)])
        assert (update.index, update.finish_reason, update.token_ids) == (index, "stop", [])
        r.take([update])
        assert r.engine.abort([("r", index)]) == []
    r.run()
    r.check_empty()
    for index in set(range(3)) - set(gone):
        assert r.tokens["r", index] == expected_tokens(q, index, 4096, 10**6)
        assert r.finished["r", index].finish_reason == "length"
    assert sum(r.scheduler.stats().finished.values()) == 1


def test_one_sample_of_a_forked_request_ends_alone() -> None:
    r = rig()
    r.engine.add(request("r", 9, n=3, seed=1, temperature=1, max_tokens=6))
    r.step()
    (update,) = r.engine.abort([("r", 1)])
    assert (update.index, update.finish_reason) == (1, "stop")
    r.take([update])
    r.run()
    assert [len(r.tokens["r", i]) for i in range(3)] == [6, 1, 6]


def test_dead_entries_of_the_queue_are_skipped() -> None:
    r = rig(max_num_seqs=2)
    for name in "ab":
        r.engine.add(request(name, 4, max_tokens=3))
    r.step()
    for name in "cd":
        r.engine.add(request(name, 4, max_tokens=3))
    r.engine.abort(["a", "b", "c"])
    r.step()
    assert [s.request.id for s in r.scheduler.running] == ["d"]
    r.run()
    r.check_empty()


def test_a_result_for_a_request_that_ended_meanwhile_is_dropped() -> None:
    r = rig()
    for name in "ab":
        r.engine.add(request(name, 4, max_tokens=3))
    plan = r.scheduler.schedule()
    assert plan is not None
    result = r.runner.execute(plan)
    r.engine.abort(["a"])
    updates = r.scheduler.commit(plan, result)
    assert [(u.request_id, u.token_ids) for u in updates] == [("b", [int(result.tokens[1])])]
    r.scheduler.check()


def test_fork_seeds_do_not_depend_on_preemption() -> None:
    q = request("r", 30, n=3, seed=5, temperature=1, max_tokens=20)
    tight = rig(blocks=14, block_size=4, max_num_seqs=8)
    tight.engine.add(request("x", 8, max_tokens=40, priority=-1))
    tight.step()
    tight.engine.add(q)
    tight.run()
    assert tight.scheduler.stats().preemptions > 0
    for i in range(3):
        assert tight.tokens["r", i] == expected_tokens(q, i, 4096, 10**6)


# -------------------------------------------------------------------------------- looking in


def test_stats_add_up() -> None:
    r = rig(blocks=101, block_size=4)
    for name in "ab":
        r.engine.add(request(name, 6, max_tokens=3))
    r.engine.add(request("c", 6, max_tokens=3))
    r.engine.abort(["c"])
    r.step()
    stats = r.scheduler.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_total, stats.kv_blocks_used) == (
        2,
        0,
        100,
        4,
    )
    assert (stats.kv_slots_allocated, stats.kv_slots_used, stats.kv_slots_wasted) == (16, 12, 4)
    assert (stats.requests, stats.prompt_tokens, stats.output_tokens) == (3, 18, 2)
    r.run()
    stats = r.scheduler.stats()
    assert stats.finished == {"stop": 0, "length": 2, "abort": 1, "error": 0}
    assert sum(stats.finished.values()) == stats.requests


def test_the_audit_sees_a_stale_running_list() -> None:
    r = rig()
    r.engine.add(request("a", 4))
    r.step()
    r.scheduler.running.clear()
    with pytest.raises(AssertionError, match="running list is stale"):
        r.scheduler.check()


def test_nothing_to_do() -> None:
    scheduler = Scheduler(BlockManager(4, 4), SchedulerLimits(4, 4, 4))
    assert scheduler.schedule() is None and not scheduler.has_unfinished()
