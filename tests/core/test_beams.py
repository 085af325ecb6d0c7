"""Beam search through the real scheduler, on a model that is a hash function: each outcome is that of a
search written down plainly, whatever the pool's size and the neighbours."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support import EOS, VOCAB, NullRunner, Rig, content, mix, request, rig

from octavo.core.blocks import root_hash
from octavo.core.types import (
    BeamCandidates,
    ParamError,
    Request,
    RequestRefused,
    SamplingParams,
    StepPlan,
    StepResult,
)

ROOT = int.from_bytes(root_hash(None, None, ())[:8], "little")
TOKENS = 12


def options(last: int) -> list[tuple[float, int]]:
    """(log-probability, token) of what may follow the KV number `last`, in falling order."""
    weights = np.array([mix(last ^ (i + 1)) % 10**9 + 10**6 for i in range(TOKENS)], np.float64)
    logprobs = np.log(weights / weights.sum())
    tokens = [mix(last + i) % VOCAB if i > 1 else EOS[i] for i in range(TOKENS)]
    first = {token: float(value) for token, value in zip(tokens, logprobs, strict=True)}
    return sorted(((value, token) for token, value in first.items()), reverse=True)


class BeamRunner(NullRunner):
    """Gives beams the candidates that follow from their KV numbers."""

    def _compute(self, part: StepPlan) -> StepResult:
        again = any(i.sequence.beams and i.sequence.beams.sources for i in part.items)
        refs = self.blocks._refs
        if again:  # the others of the group share what its first beam is writing
            self.blocks._refs = [min(count, 1) for count in refs]
        try:
            return super()._compute(part)
        finally:
            self.blocks._refs = refs

    def _execute(self, step: StepPlan) -> StepResult:
        result = super()._execute(step)
        found, row = {}, 0
        for item in step.items:
            if item.samples and item.sequence.beams is not None:
                s = item.sequence
                last = int(content(ROOT, s.tokens[: s.num_tokens])[-1])
                best = options(last)
                found[row] = BeamCandidates([t for _, t in best], [v for v, _ in best])
            row += item.samples
        return StepResult(result.tokens, (), result.prompt_logprobs, found)


def searched(asked: Request) -> list[tuple[list[int], float]]:
    """(output, score) of the n best, as transformers' `_beam_search` finds them."""
    params, width = asked.params, asked.params.width
    prompt, penalty = list(asked.prompt_token_ids), params.length_penalty
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    pool: list[tuple[float, list[int]]] = []
    for length in range(1, (params.max_tokens or 0) + 1):
        grown = []
        for total, out in running:
            last = int(content(ROOT, np.array(prompt + out))[-1])
            grown += [(total + value, [*out, token]) for value, token in options(last)]
        grown.sort(key=lambda each: -each[0])
        ends = [out[-1] in asked.eos_token_ids or length == params.max_tokens for _, out in grown]
        pool += [
            (total / length**penalty, out)
            for (total, out), end in zip(grown[:width], ends, strict=False)
            if end
        ]
        pool = sorted(pool, key=lambda each: -each[0])[:width]
        running = [each for each, end in zip(grown, ends, strict=True) if not end][:width]
        if not running:
            break
        if len(pool) == width:
            far = length
            if params.early_stopping == "never" and penalty > 0:
                far = params.max_tokens or 0
            if params.early_stopping is True or running[0][0] / far**penalty <= pool[-1][0]:
                break
    return [(out, score) for score, out in pool[: params.n]]


def check(made: Rig, asked: list[Request]) -> None:
    for each in asked:
        if not each.params.use_beam_search:
            assert made.finished[each.id, 0].finish_reason == "length"
            continue
        best = searched(each)
        for index, (out, score) in enumerate(best):
            assert made.tokens[each.id, index] == out, (each.id, index)
            assert made.finished[each.id, index].score == pytest.approx(score, abs=1e-9)


def beams(name: str, prompt: int, width: int, **params: object) -> Request:
    return request(name, prompt, eos=EOS, use_beam_search=True, n=width, **params)


@pytest.mark.parametrize("stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_outcome_is_that_of_a_plain_search(stopping: bool | str, penalty: float) -> None:
    made = rig(block_size=4, runner=BeamRunner)
    asked = [
        beams(f"{w}", 5 + w, w, max_tokens=14, early_stopping=stopping, length_penalty=penalty)
        for w in (1, 2, 3, 4, 16)
    ]
    for each in asked:
        made.engine.add(each)
    made.run()
    check(made, asked)
    made.check_empty()
    assert made.runner.copies > 0


@pytest.mark.parametrize("seed", range(25))
def test_groups_are_preempted_together_and_go_on_exactly(seed: int) -> None:
    dice = random.Random(seed)
    made = rig(
        blocks=dice.choice([26, 34, 45]),
        block_size=dice.choice([2, 3, 4]),
        max_num_seqs=dice.choice([4, 6, 9]),
        budget=dice.choice([9, 16, 64]),
        prefix_caching=dice.random() < 0.7,
        rest=dice.choice([0, 0, 2]),
        runner=BeamRunner,
    )
    asked: list[Request] = []
    for i in range(7):
        if dice.random() < 0.6:
            each = beams(f"{seed}-{i}", dice.randrange(1, 12), dice.randrange(2, 5), max_tokens=9)
        else:
            each = request(f"{seed}-{i}", dice.randrange(1, 12), max_tokens=11)
        try:
            made.engine.add(each)
        except RequestRefused:
            continue
        asked.append(each)
    aborted = asked[0].id if asked and dice.random() < 0.3 else None
    for _ in range(3):
        made.step()
        made.scheduler.check()
    if aborted is not None:
        made.take(made.engine.abort([aborted]))
    while made.engine.has_unfinished():
        made.step()
        made.scheduler.check()
    check(made, [each for each in asked if each.id != aborted])
    made.check_empty()


def test_beams_share_blocks() -> None:
    made = rig(block_size=4, runner=BeamRunner)
    made.engine.add(beams("a", 16, 4, max_tokens=8))
    physical = logical = 0
    while made.engine.has_unfinished():
        made.step()
        tables = [s.blocks for s in made.scheduler.sequences()]
        logical = max(logical, sum(len(table) for table in tables))
        physical = max(physical, len({block for table in tables for block in table}))
    assert 0 < physical < logical


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    made = rig(blocks=20, block_size=4, max_num_seqs=8, runner=BeamRunner)
    with pytest.raises(RequestRefused, match="needs 12 sequences at once, this engine runs 8"):
        made.engine.add(beams("a", 4, 12, max_tokens=4))
    with pytest.raises(RequestRefused, match="8 beams need up to 33 KV blocks"):
        made.engine.add(beams("a", 4, 8, max_tokens=17))
    made.check_empty()


def test_an_aborted_group_gives_everything_back() -> None:
    made = rig(block_size=4, runner=BeamRunner)
    made.engine.add(beams("a", 9, 4, max_tokens=30))
    for _ in range(4):
        made.step()
    ends = made.engine.abort(["a"])
    assert [(u.index, u.finish_reason) for u in ends] == [(i, "abort") for i in range(4)]
    made.check_empty()


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": True, "early_stopping": "later"}, "early_stopping"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_parameters_that_contradict_are_refused(values: dict[str, object], param: str) -> None:
    with pytest.raises(ParamError) as refused:
        SamplingParams(**values)
    assert refused.value.param == param
