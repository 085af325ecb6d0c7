"""Beams over the null engine of `support`: candidates that follow from KV numbers, and the same search
written down plainly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import EOS, VOCAB, NullRunner, Rig, content, mix, request

from octavo.core.beam_text import BeamTexts
from octavo.core.blocks import root_hash
from octavo.core.sequence import Sequence
from octavo.core.types import BeamCandidates, Request, StepPlan, StepResult

ROOT = int.from_bytes(root_hash(None, None, ())[:8], "little")
TOKENS = 12


def options(last: int) -> list[tuple[float, int]]:
    """(log-probability, token) of what may follow the KV number `last`, in falling order."""
    weights = np.array([mix(last ^ (i + 1)) % 10**9 + 10**6 for i in range(TOKENS)], np.float64)
    logprobs = np.log(weights / weights.sum())
    tokens = [mix(last + i) % VOCAB if i > 1 else EOS[i] for i in range(TOKENS)]
    first = {token: float(value) for token, value in zip(tokens, logprobs, strict=True)}
    return sorted(((value, token) for token, value in first.items()), reverse=True)


def letter(token: int) -> str:
    """A token's text."""
    return chr(ord("a") + token % 26)


def letters() -> BeamTexts:
    """Texts of beams whose tokens are letters."""
    tokenizer: Any = SimpleNamespace(
        decoder_kind="byte_level",
        special_ids=frozenset(EOS),
        strips_leading_space=False,
        token_bytes=lambda token: letter(token).encode(),
    )
    return BeamTexts(lambda: tokenizer)


class BeamRunner(NullRunner):
    """Gives beams the candidates that follow from their KV numbers."""

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

    @staticmethod
    def is_last_part(sequence: Sequence, end: int) -> bool:
        """A beam that is computed again draws with its group, later."""
        left = sequence.num_tokens - end
        return left == 0 or (left == 1 and sequence.beams is not None and sequence.beams.begun)


def searched(asked: Request) -> list[tuple[list[int], float]]:
    """(output, score) of the n best, as transformers' `_beam_search` finds them."""
    params, width = asked.params, asked.params.width
    prompt, penalty = list(asked.prompt_token_ids), params.length_penalty
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    pool: list[tuple[float, list[int]]] = []

    def ends(out: list[int]) -> bool:
        if len(out) == params.max_tokens:
            return True
        if len(out) < params.min_tokens:
            return False
        stops = set(params.stop_token_ids or ()) | set(
            () if params.ignore_eos else asked.eos_token_ids
        )
        # A stop string counts where it lies wholly behind the first min_tokens tokens.
        text = "".join(letter(t) for t in out[params.min_tokens :] if t not in EOS)
        return out[-1] in stops or any(text.endswith(stop) for stop in params.stops)

    for length in range(1, (params.max_tokens or 0) + 1):
        grown = []
        for total, out in running:
            last = int(content(ROOT, np.array(prompt + out))[-1])
            grown += [(total + value, [*out, token]) for value, token in options(last)]
        grown.sort(key=lambda each: -each[0])
        ended = [ends(out) for _, out in grown]
        pool += [
            (total / length**penalty, out)
            for (total, out), end in zip(grown[:width], ended, strict=False)
            if end
        ]
        pool = sorted(pool, key=lambda each: -each[0])[:width]
        running = [each for each, end in zip(grown, ended, strict=True) if not end][:width]
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
    """That every request ended with what it finds alone."""
    for each in asked:
        if not each.params.use_beam_search:
            assert made.finished[each.id, 0].finish_reason == "length"
            continue
        best = searched(each)
        for index, (out, score) in enumerate(best):
            assert made.tokens[each.id, index] == out, (each.id, index)
            assert made.finished[each.id, index].score == pytest.approx(score, abs=1e-9)
        assert made.finished[each.id, 0].beams == (
            None if len(best) == each.params.n else len(best)
        )
        assert (each.id, len(best)) not in made.finished


def beams(name: str, prompt: int, width: int, **params: object) -> Request:
    """A request that asks for all of its `width` beams."""
    return request(name, prompt, eos=EOS, use_beam_search=True, n=width, **params)
