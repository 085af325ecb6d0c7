"""Every way of decoding under everything that may befall a request: each cell equals its plain run.

Plain: alone in a fresh engine without speculation and prefix cache, all of a prompt in one step, answered at once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from byte_model import byte_llama

from octavo import LLM
from octavo.core.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from octavo.core.types import CompletionOutput

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 16  # tokens of a block
PROMPT = "the names of names, the names of names, and a name: "
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 23, 456]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "n": {"n": 3, "temperature": 1.0, "seed": 4},
    "structured": {"structured_outputs": StructuredOutputsParams(json=PERSON), "temperature": 0.0},
    "n, structured": {
        "n": 3, "temperature": 1.0, "seed": 7, "structured_outputs": StructuredOutputsParams(json=PERSON),
    },
    "stop, logprobs": {"temperature": 1.0, "seed": 12, "stop": ["e", "q"], "logprobs": 3, "min_tokens": 9},
    "beams": {"use_beam_search": True, "best_of": 4, "n": 3, "logprobs": 2, "length_penalty": 0.5, "max_tokens": 20},
    "beams, stop": {
        "use_beam_search": True, "n": 3, "stop": ["e", "q"], "min_tokens": 5, "include_stop_str_in_output": True,
    },
    "beams, structured": {
        "use_beam_search": True, "n": 3, "structured_outputs": StructuredOutputsParams(json=PERSON),
    },
}  # fmt: skip
BEAMS = [way for way in WAYS if way.startswith("beams")]
SITUATIONS: dict[str, dict[str, Any]] = {
    "prefix hit": {},
    "chunked": {"max_num_batched_tokens": 11},
    "recomputed": {"num_kv_blocks": 40},
    "swapped": {"num_kv_blocks": 14, "swap_space": 0.05, "preemption_mode": "swap"},
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"))


def params(way: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, **WAYS[way], **more})


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[LLM]:
    values = {"num_kv_blocks": 200, "block_size": SIZE, "device": "cpu", "dtype": "float32"}
    llm = LLM(str(folder), load_progress=False, max_model_len=120, **{**values, **options})
    try:
        yield llm
        llm._engine.scheduler.check()
        assert llm._engine.stats().kv_blocks_used == 0
    finally:
        llm.shutdown()


def answer(
    llm: LLM, prompts: list[str], asked: list[SamplingParams], stream: bool
) -> list[list[tuple[Any, ...]]]:
    """What each prompt's samples are in the end: tokens, text, logprobs, how they ended."""
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    ready = [llm.tokenize(prompt) for prompt in prompts]
    requests = llm._requests(ready, asked, kind, None)
    parts: dict[tuple[str, int], list[CompletionOutput]] = defaultdict(list)
    for name, output in llm._run(ready, requests):
        for sample in output.outputs:
            parts[name, sample.index].append(sample)
        llm._engine.scheduler.check()
    return [
        [_joined(parts[request.id, i]) for i in range(request.params.n)] for request in requests
    ]


def _joined(parts: list[CompletionOutput]) -> tuple[Any, ...]:
    last = parts[-1]
    return (
        [token for part in parts for token in part.token_ids],
        "".join(part.text for part in parts),
        [entry for part in parts for entry in part.logprobs or ()],
        last.finish_reason,
        last.stop_reason,
        last.score and round(last.score, 3),
    )


@cache
def plain(folder: Path, way: str) -> list[tuple[Any, ...]]:
    with opened(folder, enable_prefix_caching=False) as llm:
        return answer(llm, [PROMPT], [params(way)], stream=False)[0]


CELLS = [
    pytest.param(
        *cell,
        id="-".join([cell[0], cell[1], "drafts" * cell[2], "streamed" if cell[3] else "whole"]),
        # Of the last column half are for the slow lane: all its ways run, with drafts and without.
        marks=[pytest.mark.slow] * (cell[1] == "swapped" and cell[2] != cell[3]),
    )
    for cell in itertools.product(WAYS, SITUATIONS, (False, True), (False, True))
]


@pytest.mark.parametrize(("way", "situation", "speculating", "stream"), CELLS)
def test_a_cell(folder: Path, way: str, situation: str, speculating: bool, stream: bool) -> None:
    options = SITUATIONS[situation] | ({"speculative_config": DRAFTS} if speculating else {})
    with opened(folder, **options) as llm:
        prompts, asked = [PROMPT], [params(way)]
        if situation == "prefix hit":
            answer(llm, [PROMPT + "x"], [params("greedy", max_tokens=3)], stream=False)
        else:  # others that want the same blocks and steps
            prompts = ["what comes first " * 2, PROMPT, "names " * 9]
            crowd = params("greedy", ignore_eos=True, max_tokens=60)
            asked = [crowd, *asked, crowd]
        if situation in ("recomputed", "swapped"):
            preempt_often(llm._engine)
        before = llm._engine.stats()
        found = answer(llm, prompts, asked, stream)[prompts.index(PROMPT)]
        after = llm._engine.stats()
    expected = plain(folder, way)
    assert [sample[:2] for sample in found] == [sample[:2] for sample in expected]
    assert [sample[3:] for sample in found] == [sample[3:] for sample in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine[2], theirs[2])
    assert (after.prefix_hit_tokens > before.prefix_hit_tokens) >= (situation == "prefix hit")
    assert (after.preemptions > 0) >= (situation in ("recomputed", "swapped"))
    assert (after.swaps > 0) == (after.swapped_in_blocks > 0) == (situation == "swapped")
    if way not in BEAMS:  # who go without drafts, and leave them to their neighbours
        assert (after.drafted_tokens > 0) == speculating
    if way in ("greedy", "structured"):
        assert (after.accepted_tokens > 0) == speculating


def preempt_often(engine: Any) -> None:
    """Every few steps all that run give up their blocks, as if they had run out."""
    step = engine.step
    steps = itertools.count(1)

    def after_a_preemption() -> Any:
        if next(steps) in (3, 9, 17):
            preempt_all(engine)
        return step()

    engine.step = after_a_preemption


def preempt_all(engine: Any) -> None:
    """All that run give up their blocks."""
    roster = engine.scheduler.roster
    for sequence in list(roster.running):
        if sequence.running:  # else it is a beam, and went with another
            roster.preempt(sequence)


def assert_close(mine: list[Any], theirs: list[Any]) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert list(a) == list(b)
        for token in a:
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("speculating", "swapping"),
    [
        (False, False),
        (True, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_aborts_in_the_middle(folder: Path, speculating: bool, swapping: bool) -> None:
    """At any step: the others' answers are untouched, and nothing stays behind."""
    options: dict[str, Any] = {"num_kv_blocks": 16, "max_num_batched_tokens": 24}
    if speculating:
        options["speculative_config"] = DRAFTS
    if swapping:
        options |= {"num_kv_blocks": 12, "swap_space": 0.05, "preemption_mode": "swap"}
    with opened(folder, **options) as llm:
        for way, steps in itertools.product(WAYS, (1, 3, 7)):
            ready = [llm.tokenize(PROMPT), llm.tokenize(PROMPT)]
            gone, stays = llm._requests(
                ready, [params(way), params("greedy")], RequestOutputKind.FINAL_ONLY, None
            )
            engine = llm._engine
            engine.add(gone)
            engine.add(stays)
            tokens: list[int] = []
            for step in range(500):
                if step == steps:
                    engine.abort([gone.id])
                    engine.scheduler.check()
                if swapping and step == 2:
                    preempt_all(engine)
                for update in engine.step():
                    tokens += update.token_ids if update.request_id == stays.id else []
                engine.scheduler.check()
                if not engine.has_unfinished():
                    break
            assert tokens == plain(folder, "greedy")[0][0]
        assert (llm._engine.stats().swaps > 0) == swapping
