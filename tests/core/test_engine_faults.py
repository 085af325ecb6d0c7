"""Cases that engines of this kind have got wrong, at the level of scheduler and engine."""

from __future__ import annotations

import pytest
from support import EOS, VOCAB, Rig, expected_tokens, request, rig

from octavo.core.params import RequestRefused
from octavo.core.scheduler import MAX_PREEMPTIONS
from octavo.core.types import StepPlan

POOL = 10**6


def equal_to_alone(r: Rig, *requests) -> None:
    for q in requests:
        assert r.tokens[q.id, 0] == expected_tokens(q, 0, r.scheduler.limits.max_model_len, POOL), (
            q.id
        )


def test_an_impossible_request_blocks_nobody() -> None:
    r = rig(blocks=50, block_size=16)
    short = [request(f"s{i}", 5 + i, max_tokens=12) for i in range(11)]
    for q in short[:10]:
        r.engine.add(q)
    for i in range(5):
        with pytest.raises(RequestRefused, match=r"needs 6\d KV blocks .*the KV cache has 49"):
            r.engine.add(request(f"big{i}", 1000, max_tokens=12))
    r.engine.add(short[10])
    assert r.run() < 40
    equal_to_alone(r, *short)
    r.check_empty()


def test_aborted_waiters_leave_their_places() -> None:
    r = rig(max_num_seqs=2)
    for name in "ab":
        r.engine.add(request(name, 5, max_tokens=1000))
    r.step()
    r.take(r.engine.abort(["a", "b"]))
    r.engine.add(request("c", 5, max_tokens=3))
    assert r.run() == 3
    assert len(r.tokens["c", 0]) == 3


def test_equal_priorities_in_a_tiny_pool_all_finish() -> None:
    """A pool for two and a half requests, twelve of them arriving over time."""
    r = rig(blocks=1 + 10, block_size=4, budget=64)
    requests = [request(str(i), 6, max_tokens=10) for i in range(12)]
    for q in requests:
        r.engine.add(q)
        r.step()
    r.run(2000)
    assert r.scheduler.stats().preemptions > 0
    assert r.worst_preemptions <= MAX_PREEMPTIONS + 1
    equal_to_alone(r, *requests)
    r.check_empty()


def test_every_other_decoder_emits_in_the_step_that_preempts_one() -> None:
    """Budget 32, four decoders and a prompt of 300 tokens, and a pool that is one decoder too small."""
    r = rig(blocks=1 + 60, block_size=8, budget=32, prefix_caching=False)
    decoders = [request(f"d{i}", 30, max_tokens=60) for i in range(4)]
    for q in decoders:
        r.engine.add(q)
    while any(not r.tokens[q.id, 0] for q in decoders):
        r.step()
    r.engine.add(request("long", 300, max_tokens=20, priority=-1))
    preempting = 0
    plans: list[StepPlan] = []
    r.runner.hook = plans.append
    while r.engine.has_unfinished():
        decoding = {s.request.id for s in r.scheduler.running if s.num_tokens - s.num_computed == 1}
        emitted = {u.request_id for u in r.step() if u.token_ids}
        gone = set(plans[-1].preempted)
        preempting += bool(gone) and len(plans[-1].items) < plans[-1].num_tokens
        assert decoding - gone <= emitted
    assert preempting >= 1
    equal_to_alone(r, *decoders, request("long", 300, max_tokens=20))


def test_dropped_streams_leave_a_clean_cache() -> None:
    r = rig(block_size=4)
    prompt = list(range(20))
    r.engine.add(request("a", prompt, max_tokens=50))
    for _ in range(5):
        r.step()
    r.take(r.engine.abort(["a"]))
    q = request("b", [*prompt, *r.tokens["a", 0], 77], max_tokens=10)
    r.engine.add(q)
    r.run()
    equal_to_alone(r, q)
    assert r.finished["b", 0].num_cached_tokens == 24
    r.check_empty()


# ------------------------------------------------------------------------- prompt logprobs


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("budget", [7, 512])
def test_prompt_logprobs_do_not_depend_on_the_cache(length: int, budget: int) -> None:
    r = rig(budget=budget)
    prompt = request("p", length).prompt_token_ids
    r.engine.add(request("warm", prompt, max_tokens=1))
    r.run()
    for name in ("first", "second"):
        r.engine.add(request(name, prompt, max_tokens=3, prompt_logprobs=0))
        r.run()
        assert [e.token_id for e in r.prompt_logprobs[name]] == prompt[1:]
        assert [e.logprob for e in r.prompt_logprobs[name]] == [
            -float(p + 1) for p in range(length - 1)
        ]
    assert r.tokens["first", 0] == r.tokens["second", 0]


def test_prompt_logprobs_after_a_preemption_come_once() -> None:
    r = rig(blocks=12, block_size=4, budget=6)
    r.engine.add(request("a", 12, max_tokens=28, priority=-1))
    r.step()
    q = request("p", 20, max_tokens=3, prompt_logprobs=0)
    r.engine.add(q)
    r.run()
    assert [e.token_id for e in r.prompt_logprobs["p"]] == q.prompt_token_ids[1:]
    equal_to_alone(r, q)


# --------------------------------------------------------------------------- where it ends


def forced(
    tokens: list[int], *, eos: tuple[int, ...] = EOS, **params
) -> tuple[list[int], object, object]:
    r = rig()
    r.runner.forced["q"] = tokens
    r.engine.add(request("q", 3, eos=eos, **params))
    r.run()
    end = r.finished["q", 0]
    return r.tokens["q", 0], end.finish_reason, end.stop_reason


@pytest.mark.parametrize("eos", EOS)
def test_each_eos_of_the_list_ends(eos: int) -> None:
    assert forced([5, eos, 6]) == ([5, eos], "stop", None)


def test_ignore_eos_runs_to_its_length() -> None:
    tokens = [2, 7] * 10
    assert forced(tokens, ignore_eos=True, max_tokens=20) == (tokens, "length", None)


def test_ignore_eos_keeps_the_users_own_stop_tokens() -> None:
    assert forced([2, 7, 9, 5], ignore_eos=True, stop_token_ids=[9]) == ([2, 7, 9], "stop", 9)
    assert forced([2, 7, 9], ignore_eos=True, stop_token_ids=[7]) == ([2, 7], "stop", 7)


def test_min_tokens_outlasts_every_stop() -> None:
    tokens = [2, 7, 9, 2, 2, 5, 6]
    assert forced(tokens, min_tokens=5, stop_token_ids=[9]) == (tokens[:5], "stop", None)


def test_max_tokens_wins_over_nothing_but_a_stop_on_the_last_token() -> None:
    assert forced([5, 6, 7], max_tokens=2) == ([5, 6], "length", None)
    assert forced([5, 7], max_tokens=2) == ([5, 7], "stop", None)


@pytest.mark.parametrize("max_tokens", [1, 2, 16, 104, 105, 106, 300, None])
def test_length_is_counted_in_tokens(max_tokens: int | None) -> None:
    r = rig(max_model_len=256, budget=64)
    r.engine.add(request("q", 151, max_tokens=max_tokens))
    r.run()
    wanted = 105 if max_tokens is None else min(max_tokens, 105)
    assert len(r.tokens["q", 0]) == wanted
    assert r.finished["q", 0].finish_reason == "length"


def test_every_length_up_to_the_context() -> None:
    r = rig(max_model_len=256)
    for max_tokens in range(1, 106):
        r.engine.add(request(str(max_tokens), 151, max_tokens=max_tokens))
    r.run()
    assert all(len(r.tokens[str(m), 0]) == m for m in range(1, 106))


def test_a_prompt_longer_than_the_context_is_never_cut() -> None:
    r = rig(max_model_len=256)
    with pytest.raises(RequestRefused, match="257 tokens; at most 255 fit"):
        r.engine.add(request("q", 257))
    with pytest.raises(RequestRefused, match="256 tokens; at most 255 fit"):
        r.engine.add(request("q", 256))
    r.engine.add(request("q", 255))
    r.run()
    assert len(r.tokens["q", 0]) == 1


def test_max_tokens_zero_gives_the_prompts_logprobs_alone() -> None:
    r = rig(budget=8)
    for name, n in (("q", 1), ("many", 3)):
        q = request(name, 20, max_tokens=0, n=n, prompt_logprobs=0)
        r.engine.add(q)
        r.run()
        assert len(r.prompt_logprobs[name]) == 19
        ends = [r.finished[name, i] for i in range(n)]
        assert all((e.finish_reason, e.token_ids) == ("length", []) for e in ends)


def test_ids_are_the_engines_own() -> None:
    """Two requests of one client id come with two internal ids; ending one leaves the other."""
    r = rig()
    for name in ("x-1", "x-2"):
        r.engine.add(request(name, 5, n=2, seed=1, temperature=1, max_tokens=6))
    r.step()
    r.take(r.engine.abort(["x-1"]))
    r.run()
    assert [r.finished[f"x-{k}", i].finish_reason for k in (1, 2) for i in (0, 1)] == [
        "abort", "abort", "length", "length",
    ]  # fmt: skip
    r.check_empty()


def test_finish_reasons_add_up_to_requests() -> None:
    r = rig(max_num_seqs=4)
    r.runner.forced = {"stop": [2], "error": [-1]}
    for name in ("stop", "length", "error", "gone", "late"):
        r.engine.add(request(name, 5, eos=EOS if name == "stop" else (), max_tokens=4))
    r.step()
    r.take(r.engine.abort(["gone", "late"]))
    r.run()
    stats = r.scheduler.stats()
    assert stats.finished == {"stop": 1, "length": 1, "abort": 2, "error": 1}
    assert stats.output_tokens == sum(len(t) for t in r.tokens.values())
    assert max(max(t) for t in r.tokens.values() if t) < VOCAB
