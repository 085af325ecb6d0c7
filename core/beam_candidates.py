"""The tokens among which beam search chooses."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import torch

from octavo.core.types import BeamCandidates, TokenLogprobs

if TYPE_CHECKING:
    from octavo.core.sampler import DrawState


def beam_candidates(
    scores: torch.Tensor, raw: torch.Tensor, state: DrawState
) -> BeamCandidates | None:
    """The most likely next tokens of a beam, so many that all of W beams can go on though each of the
    tokens that end one stands among them. None where the scores are not finite.

    Args:
        scores: [V] log-probabilities after what the request forbids, -inf for what cannot come;
            raw: [V] the same before.
    """
    values, ids = torch.topk(scores, min(len(scores), max(2, 1 + state.ends) * state.beams))
    logprobs: list[float] = values.tolist()
    if any(math.isnan(value) or value == math.inf for value in logprobs):
        return None
    count = sum(value > -math.inf for value in logprobs)
    tokens: list[int] = ids[:count].tolist()
    entries = None
    if state.logprobs is not None and tokens:
        wide = len(raw) if state.logprobs < 0 else min(state.logprobs, len(raw))
        top, top_ids = torch.topk(raw, wide)
        best, best_ids = top.tolist(), top_ids.tolist()
        own: list[float] = raw[ids[:count]].tolist()
        ranks = [(raw > value).sum().item() + 1 for value in own]
        entries = [
            TokenLogprobs(token, value, int(rank), best_ids, best)
            for token, value, rank in zip(tokens, own, ranks, strict=True)
        ]
    return BeamCandidates(tokens, logprobs[:count], entries)


def forked(state: DrawState) -> DrawState:
    """The state of a beam that begins as that one's."""
    other = copy.copy(state)
    if state.penalties is not None:
        other.penalties = copy.deepcopy(state.penalties)
    if state.bad_words is not None:
        other.bad_words = copy.copy(state.bad_words)
    if state.grammar is not None:
        other.grammar = state.grammar.fork()
    return other
