"""Sampled tokens have the model's own distribution, with drafts as without.

Thousands of seeded samples of three tokens out of four, against the exact probabilities of all 64 outcomes,
multiplied from the model's log-probabilities behind every beginning. The seeds are fixed, so the outcome is
too; the threshold is the chi-square statistic that a right sampler exceeds with 64 outcomes once in about
100,000 choices of seeds (its normal approximation by Wilson and Hilferty at 4.26 standard deviations).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from byte_model import byte_llama

from octavo import LLM, SamplingParams
from octavo.core.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("one_thread")

LETTERS = "abcd"
PROMPT = "abcabdacbabcabdadcbabcacbdabcabddabcab"
LENGTH, SAMPLES, WIDTH = 3, 2048, 128
TEMPERATURE = 1.5
LIMIT = 4.26
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"))


def opened(folder: Path, **options: Any) -> LLM:
    values = {"num_kv_blocks": 2000, "device": "cpu", "dtype": "float32", "max_num_seqs": WIDTH}
    values |= {"max_num_batched_tokens": 1024, "max_logprobs": -1, "load_progress": False}
    return LLM(str(folder), max_model_len=100, **values, **options)


def exact(llm: LLM, prompt: list[int], letters: list[int]) -> dict[tuple[int, ...], float]:
    """The probability of every outcome."""
    behind = [b for n in range(LENGTH) for b in itertools.product(letters, repeat=n)]
    asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1)
    outputs = llm.generate([[*prompt, *b] for b in behind], asked)
    following: dict[tuple[int, ...], dict[int, float]] = {}
    for beginning, output in zip(behind, outputs, strict=True):
        [at] = output.outputs[0].logprobs or []
        weights = {t: math.exp(at[t].logprob / TEMPERATURE) for t in letters}
        total = sum(weights.values())
        following[beginning] = {t: w / total for t, w in weights.items()}
    return {
        outcome: math.prod(following[outcome[:i]][outcome[i]] for i in range(LENGTH))
        for outcome in itertools.product(letters, repeat=LENGTH)
    }


def statistic(counts: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    """How many standard deviations a chi-square statistic lies above what is expected of a right sampler.
    Outcomes expected fewer than 5 times count as one."""
    total = sum(counts.values())
    rare = [outcome for outcome, p in wanted.items() if p * total < 5]
    cells = [(counts[o], p * total) for o, p in wanted.items() if o not in rare]
    if rare:
        cells.append((sum(counts[o] for o in rare), sum(wanted[o] for o in rare) * total))
    chi = sum((got - mean) ** 2 / mean for got, mean in cells)
    free = len(cells) - 1
    spread = 2 / (9 * free)
    return float(((chi / free) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def sampled(llm: LLM, prompt: list[int], letters: list[int]) -> Counter[tuple[int, ...]]:
    """One token more is asked for than is counted, so that a draft reaches to the last that is."""
    asked = [
        SamplingParams(
            n=WIDTH, seed=seed, max_tokens=LENGTH + 1, temperature=TEMPERATURE, allowed_token_ids=letters,
            ignore_eos=True,
        )
        for seed in range(1, 1 + SAMPLES // WIDTH)
    ]  # fmt: skip
    outputs = llm.generate([prompt] * len(asked), asked, use_tqdm=False)
    return Counter(tuple(sample.token_ids[:LENGTH]) for o in outputs for sample in o.outputs)


@pytest.mark.parametrize("speculating", [False, True], ids=["plain", "drafts"])
def test_outcomes_come_as_often_as_they_should(folder: Path, speculating: bool) -> None:
    options = {"speculative_config": DRAFTS} if speculating else {}
    with opened(folder, **options) as llm:
        prompt = llm.tokenize(PROMPT).token_ids
        letters = [llm.tokenize(letter).token_ids[0] for letter in LETTERS]
        wanted = exact(llm, prompt, letters)
        before = llm._engine.stats()
        counts = sampled(llm, prompt, letters)
        after = llm._engine.stats()
    assert sum(counts.values()) == SAMPLES and set(counts) <= set(wanted)
    assert statistic(counts, wanted) < LIMIT
    if speculating:  # and drafts were right and wrong, many times each
        drafted = after.drafted_tokens - before.drafted_tokens
        accepted = after.accepted_tokens - before.accepted_tokens
        assert accepted > SAMPLES / 10 and drafted - accepted > SAMPLES / 10


def test_a_draft_that_is_taken_too_easily_shows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One draft in ten is taken whatever was drawn in its place."""
    verify = Scheduler._take_drafted
    calls = itertools.count()

    def lax(self: Any, item: Any, result: Any, tokens: list[int], *rest: Any) -> None:
        if next(calls) % 10 == 0:
            s = item.sequence
            tokens = [*s.tokens[s.num_tokens :][: item.drafts].tolist(), tokens[-1]]
        verify(self, item, result, tokens, *rest)

    monkeypatch.setattr(Scheduler, "_take_drafted", lax)
    with opened(folder, speculative_config=DRAFTS) as llm:
        prompt = llm.tokenize(PROMPT).token_ids
        letters = [llm.tokenize(letter).token_ids[0] for letter in LETTERS]
        assert statistic(sampled(llm, prompt, letters), exact(llm, prompt, letters)) > LIMIT
