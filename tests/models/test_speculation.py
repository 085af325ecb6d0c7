"""Drafts on the default model: text that is copied is drafted right, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.config import ConfigError
from octavo.core.entry.bench.speculation import TASKS
from octavo.core.params import StructuredOutputsParams

DRAFTS = {"method": "ngram", "num_speculative_tokens": 6, "adaptive": False}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {"temperature": 0.3, "seed": 3, "n": 2, "logprobs": 2},
    "stop": {"temperature": 0.0, "stop": ["salt and"]},
    "structured": {
        "temperature": 0.0,
        "structured_outputs": StructuredOutputsParams(regex="The harbour master [a-z ]{20,60}\\."),
    },
}


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[bool, dict[str, Any]]]:
    found: dict[bool, dict[str, Any]] = {}
    for drafting in (False, True):
        options = {"speculative_config": DRAFTS} if drafting else {}
        with LLM(dtype="float32", kv_memory=256 << 20, load_progress=False, **options) as llm:
            outputs = llm.generate(
                [TASKS["quote"]] * len(CASES),
                [SamplingParams(max_tokens=48, **fields) for fields in CASES.values()],
                use_tqdm=False,
            )
            llm._engine.scheduler.check()
        found[drafting] = dict(zip(CASES, outputs, strict=True))
    yield found


@pytest.mark.parametrize("case", CASES)
def test_the_same_answer(answers: dict[bool, dict[str, Any]], case: str) -> None:
    plain, drafted = answers[False][case], answers[True][case]
    for a, b in zip(plain.outputs, drafted.outputs, strict=True):
        assert (list(a.token_ids), a.text) == (list(b.token_ids), b.text)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        for mine, theirs in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert list(mine) == list(theirs)
            for token in mine:
                assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
    assert plain.metrics.num_drafted_tokens == 0


def test_what_is_copied_is_drafted_right(answers: dict[bool, dict[str, Any]]) -> None:
    metrics = answers[True]["greedy"].metrics
    assert metrics.num_accepted_tokens > 20
    assert metrics.num_drafted_tokens >= metrics.num_accepted_tokens


def test_a_method_that_is_not_there_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ngram'"):
        LLM(speculative_config={"method": "n-grams"}, load_progress=False)
