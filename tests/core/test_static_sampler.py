"""The draw on devices of static shapes: the same tokens and log-probabilities, at padded shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import request

from octavo.core.batch import prompt_logprob_rows
from octavo.core.blocks import root_hash
from octavo.core.contract import Ops, SampleInputs
from octavo.core.sampler import Sampler, StaticSampler, sample_program
from octavo.core.sequence import Sequence
from octavo.core.types import ScheduledTokens, StepPlan

V = 50
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.5, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "n": 3},
    {"n": 2, "logprobs": 2},
    {"temperature": 1.0, "logprobs": 3},
    {"presence_penalty": 1.5, "logprobs": 0},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"logit_bias": {3: 50.0}},
    {"allowed_token_ids": [4, 9]},
    {"prompt_logprobs": 2},
    {"prompt_logprobs": 0, "temperature": 1.0, "logit_bias": {7: 20.0}, "n": 2},
)


def no_vocabulary(skip_special: bool) -> Any:
    raise AssertionError("the vocabulary is only for bad words")


def plan_of(ways: list[int]) -> StepPlan:
    items = []
    for i, way in enumerate(ways):
        q = request(f"r{i}", [(7 * i + k * k) % V for k in range(6)], seed=i, **WAYS[way])
        s = Sequence(q, i, root_hash(None, None, ()), i, 10_000)
        scores = q.params.prompt_logprobs is not None
        start = 0 if scores else 5
        items.append(ScheduledTokens(s, start, 6 - start, q.params.n, scores))
    items.append(ScheduledTokens(Sequence(request("cut", 9), 99, b"", 0, 99), 0, 4, 0))
    return StepPlan(1, tuple(items), lane=len(ways) % 2)


class Program:
    """The compiled program, and the shapes and dtypes it was called with."""

    def __init__(self) -> None:
        self._fn = sample_program(Ops())
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        vectors = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.counter)
        assert {len(v) for v in vectors} == {len(logits)}
        self.shapes.add(tuple(logits.shape))
        return self._fn(logits, rows)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, len(WAYS) - 1), max_size=6), st.sampled_from(["float32", "bfloat16"])
)
def test_the_same_as_the_sampler_of_dynamic_shapes(ways: list[int], dtype: str) -> None:
    plan, again = plan_of(ways), plan_of(ways)
    rows = sum(i.samples + len(prompt_logprob_rows(i)) for i in plan.items)
    torch.manual_seed(len(ways))
    logits = (3 * torch.randn(40, V)).to(getattr(torch, dtype))
    wanted = Sampler(Ops().sample, Ops(), "cpu", no_vocabulary).run(plan, logits[:rows].clone())
    program = Program()
    using = StaticSampler(program, "cpu", no_vocabulary)
    before = logits.clone()
    for _ in range(2):  # what it keeps between steps changes nothing
        found = using.run(again, logits, rows)
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert list(found.logprobs) == list(wanted.logprobs)
        assert found.prompt_logprobs == wanted.prompt_logprobs
    assert torch.equal(logits, before)
    assert program.shapes <= {(40, V)}


def test_rows_without_a_finite_choice_fail_alone() -> None:
    plan = plan_of([0, 1, 0, 7, 5])
    logits = torch.randn(8, V)
    logits[0, 3] = float("inf")
    logits[1] = float("-inf")
    logits[3, 4] = float("nan")
    tokens = StaticSampler(Program(), "cpu", no_vocabulary).run(plan, logits, 5).tokens
    assert (tokens < 0).tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("size", [3, 8])
def test_padded_rows_of_the_other_sampler(size: int) -> None:
    """Buckets without static shapes: the program sees the padding, the caller does not."""
    program = Program()
    using = Sampler(program, Ops(), "cpu", no_vocabulary)
    logits = torch.randn(size, V)
    plain = Sampler(Ops().sample, Ops(), "cpu", no_vocabulary)
    for ways in ([0, 0, 0], [1, 2, 8], [5, 5, 5]):
        found = using.run(plan_of(ways), logits.clone(), 3)
        assert found.tokens.tolist() == plain.run(plan_of(ways), logits[:3].clone()).tokens.tolist()
        assert isinstance(found.tokens, np.ndarray)
    assert program.shapes == {(size, V)}
