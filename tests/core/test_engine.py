"""The step loop over the null runner: the same tokens whatever happens around a request, and faults."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import VOCAB, Rig, expected_tokens, model_info, request, rig

from octavo.core.engine import Engine, EngineStuck
from octavo.core.params import ParamError, RequestRefused, SamplingParams
from octavo.core.types import StepPlan, StepResult

POOL = 10**6


def alone(**fields: Any) -> list[int]:
    r = rig()
    r.engine.add(request("q", **fields))
    r.run()
    return r.tokens["q", 0]


CROWDS = {
    "ample": {},
    "chunked": {"budget": 7},
    "one at a time": {"max_num_seqs": 3, "budget": 5},
    "tight": {"blocks": 16, "block_size": 8, "budget": 32},
    "tight, no cache": {"blocks": 16, "block_size": 8, "prefix_caching": False},
    "tiny blocks": {"blocks": 120, "block_size": 1, "budget": 64},
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_alone_or_in_any_crowd(crowd: str) -> None:
    """Greedy and seeded requests put out the same, with preemption, chunking, hits and forks around."""
    r = rig(**CROWDS[crowd])
    common = list(range(30))
    subjects = {
        f"q{i}": {"prompt": common[: 10 * i] + [i] * 9, "max_tokens": 25, "priority": i % 2}
        for i in range(4)
    }
    subjects["seeded"] = {"prompt": common, "max_tokens": 20, "temperature": 1.0, "seed": 11}
    for i, (name, fields) in enumerate(subjects.items()):
        r.engine.add(request(name, **fields))
        r.engine.add(
            request(f"x{i}", common[: 7 * i + 1], max_tokens=30, n=1 + i % 3, seed=i, temperature=1)
        )
        r.step()
        r.engine.add(request(f"y{i}", 20 + i, max_tokens=12, prompt_logprobs=0, priority=-1))
    r.run()
    r.check_empty()
    if "tight" in crowd:
        assert r.scheduler.stats().preemptions > 0
    for name, fields in subjects.items():
        assert r.tokens[name, 0] == alone(**fields), name


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=8),
       st.integers(16, 40), st.integers(1, 40))  # fmt: skip
def test_mixes_equal_the_reference(sizes: list[tuple[int, int]], blocks: int, budget: int) -> None:
    r = rig(blocks=blocks, block_size=6, budget=budget)
    requests = [request(str(i), p, max_tokens=m) for i, (p, m) in enumerate(sizes)]
    for q in requests:
        r.engine.add(q)
    r.run()
    assert all(r.tokens[q.id, 0] == expected_tokens(q, 0, 4096, POOL) for q in requests)


# ------------------------------------------------------------------------- failing steps


class Failing:
    """Fails the steps it is told to; else does what the null runner does."""

    def __init__(self, r: Rig, at: set[int]) -> None:
        self.r, self.at, self.inner = r, at, r.runner

    def execute(self, step: StepPlan) -> StepResult:
        if step.step in self.at:
            raise RuntimeError("out of luck")
        return self.inner.execute(step)

    compilations = 0

    def recover(self) -> bool:
        return False

    def close(self) -> None:
        self.inner.close()


def test_a_failed_step_ends_its_requests_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    r = rig(max_num_seqs=2)
    r.engine = Engine(r.scheduler, Failing(r, {2}), model_info())
    requests = [request(name, 40, max_tokens=5) for name in "abcd"]
    for q in requests:
        r.engine.add(q)
    r.run()
    r.check_empty()
    for name in "ab":
        update = r.finished[name, 0]
        assert update.finish_reason == "error"
        assert update.stop_reason == "the step failed: RuntimeError: out of luck"
    for q in requests[2:]:
        assert r.tokens[q.id, 0] == expected_tokens(q, 0, 4096, POOL)
    assert r.scheduler.stats().finished["error"] == 2
    assert "step 2 failed" in caplog.text


def test_blocks_of_a_failed_step_are_not_remembered() -> None:
    r = rig()
    r.engine = Engine(r.scheduler, Failing(r, {1}), model_info())
    prompt = list(range(40))
    r.engine.add(request("a", prompt))
    r.run()
    r.engine.add(request("b", prompt))
    r.run()
    assert r.finished["b", 0].num_cached_tokens == 0
    assert r.tokens["b", 0] == expected_tokens(request("b", prompt), 0, 4096, POOL)


def test_unforked_samples_fail_with_their_step() -> None:
    r = rig()
    r.engine = Engine(r.scheduler, Failing(r, {1}), model_info())
    r.engine.add(request("a", 5, n=3, seed=1, temperature=1))
    r.run()
    assert [r.finished["a", i].finish_reason for i in range(3)] == ["error"] * 3


def test_a_draw_that_fails_ends_one_request() -> None:
    """-1 is the sampler's word for: nothing allowed, or logits that are not finite."""
    r = rig()
    requests = [request(name, 6, max_tokens=8) for name in "abc"]
    r.runner.forced["b"] = [5, 6, -1]
    for q in requests:
        r.engine.add(q)
    r.run()
    r.check_empty()
    end = r.finished["b", 0]
    assert (end.finish_reason, end.token_ids, r.tokens["b", 0]) == ("error", [], [5, 6])
    assert "not finite" in str(end.stop_reason)
    for q in (requests[0], requests[2]):
        assert r.tokens[q.id, 0] == expected_tokens(q, 0, 4096, POOL)


def test_a_stuck_scheduler_is_reported_not_spun() -> None:
    r = rig()
    r.engine.add(request("a", 4))
    r.scheduler.schedule = lambda: None  # type: ignore[method-assign]
    with pytest.raises(EngineStuck, match="no step can be planned"):
        r.engine.step()


def test_an_idle_step_does_nothing() -> None:
    r = rig()
    assert r.engine.step() == [] and r.runner.steps == 0


def test_shutdown_ends_all_and_closes_the_runner() -> None:
    r = rig(max_num_seqs=1)
    for name in "ab":
        r.engine.add(request(name, 4))
    r.step()
    r.engine.shutdown()
    r.check_empty()
    assert r.runner.closed and r.scheduler.stats().finished["abort"] == 2


# ------------------------------------------------------------------------ refused at the door


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([1, VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([True], {}, "prompt"),
        (["1"], {}, "prompt"),
        ([None], {}, "prompt"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {191222: -100.0}}, "logit_bias"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {"AI": -100.0}}, "logit_bias"),
        ([1], {"logit_bias": {True: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([1], {"stop_token_ids": ["</s>"]}, "stop_token_ids"),
        ([1], {"allowed_token_ids": [3, -1]}, "allowed_token_ids"),
        ([1], {"allowed_token_ids": [2.0]}, "allowed_token_ids"),
        ([1], {"logprobs": 21}, "logprobs"),
        ([1], {"prompt_logprobs": 21}, "prompt_logprobs"),
        ([1], {"logprobs": -1}, "logprobs"),
    ],
)
def test_bad_ids_never_reach_a_step(prompt: list[Any], params: dict, param: str) -> None:
    r = rig()
    neighbour = request("n", 5, max_tokens=5)
    r.engine.add(neighbour)
    r.step()
    with pytest.raises(ParamError) as caught:
        r.engine.add(request("bad", prompt, **params))
    assert caught.value.param == param
    r.run()
    r.check_empty()
    assert r.tokens["n", 0] == expected_tokens(neighbour, 0, 4096, POOL)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logit_bias": {1: 1e9}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: math.inf}}, "logit_bias"),
        ({"logit_bias": {1: "NaN"}}, "logit_bias"),
        ({"logit_bias": {1: None}}, "logit_bias"),
        ({"logit_bias": {1: True}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"stop": "a", "detokenize": False}, "stop"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["x\udfff"]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"detokenize": 0}, "detokenize"),
        ({"skip_special_tokens": None}, "skip_special_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"allowed_token_ids": np.array([5, 6])}, "allowed_token_ids"),
        ({"bad_words": {"a"}}, "bad_words"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"output_kind": 1}, "output_kind"),
        ({"best_of": 0}, "best_of"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_parameters_out_of_range_are_named(params: dict, param: str) -> None:
    with pytest.raises(ParamError) as caught:
        SamplingParams(**params)
    assert caught.value.param == param and param in str(caught.value)


def test_an_unknown_parameter_names_the_nearest() -> None:
    with pytest.raises(ParamError, match=r"max_token is not.*\(did you mean 'max_tokens'\?\)"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]


def test_no_limit_on_logprobs_when_asked_so() -> None:
    r = rig()
    r.engine.info = model_info(max_logprobs=-1)
    r.engine.add(request("a", 4, logprobs=-1, max_tokens=1))
    r.engine.info = model_info(max_logprobs=5)
    with pytest.raises(RequestRefused, match=r"logprobs=6 exceeds the engine's limit of 5"):
        r.engine.add(request("b", 4, logprobs=6))


def test_errors_and_requests_cross_a_process_boundary() -> None:
    import pickle

    error = RequestRefused("n", "n=9 is too many")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is RequestRefused and again.param == "n" and str(again) == str(error)
    q = request(
        "a", 4, logit_bias={3: 1.5}, stop_token_ids=[1], seed=2**64 - 1, image_hashes=(b"x",)
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(q), type=type(q)) == q


def test_numpy_tokens_are_tokens() -> None:
    r = rig()
    r.engine.add(request("a", list(np.array([1, 2, 3], np.int64)), max_tokens=2))
    r.run()
    assert r.tokens["a", 0] == expected_tokens(request("b", [1, 2, 3], max_tokens=2), 0, 99, POOL)
