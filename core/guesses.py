"""Grammars beside greedy draws whose logits are on the host.

As a rule the most likely token of all is one that the grammar allows, and then it is the most likely of those
that the grammar allows: no mask is needed. So rows are drawn as if they were free, and each token is put to
its grammar, which costs about as much as taking it in. Only rows whose token is refused have a mask computed
and are drawn again within it. The tokens are those of masked rows, bit by bit.

Where the device is not the host the tokens would have to be waited for in the middle of a step, while masks
are computed as long as the device is at its forward pass; so masks come first there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.core.contract import Ops
from octavo.core.sequence import Sequence as Seq
from octavo.core.structured import GrammarState, masks
from octavo.core.types import Int64


class Guess(NamedTuple):
    """Rows of one sequence that were drawn without their grammar: rows `row` to `end - 1`, each behind the one
    before and the draft that was fed there. `drafts` [end - row - 1 or more]: those drafts."""

    row: int
    end: int
    sequence: Seq
    grammar: GrammarState
    drafts: Sequence[int] = ()


def settle(ops: Ops, logits: torch.Tensor, tokens: Int64, guesses: list[Guess]) -> None:
    """Replaces those of `tokens` [L], drawn greedily from logits [L, V] float32, that a grammar forbids, by
    the most likely ones that it allows; -1 where there is none.

    A grammar goes along with its tokens, up to the first one that is not its draft.
    """
    for guess in guesses:
        sequence = guess.sequence
        if guess.grammar.consumed != sequence.num_tokens - sequence.num_prompt:
            guess.grammar.advance(sequence)
    while guesses:
        drawn: list[int] = tokens.tolist()
        refused = [left for guess in guesses if (left := _refused(guess, drawn)) is not None]
        guesses = []
        for guess, token in zip(refused, _drawn_again(ops, logits, refused), strict=True):
            tokens[guess.row] = token
            if token >= 0 and guess.row + 1 < guess.end and token == guess.drafts[0]:
                guess.grammar.take(token)
                guesses.append(guess._replace(row=guess.row + 1, drafts=guess.drafts[1:]))


def _refused(guess: Guess, drawn: list[int]) -> Guess | None:
    """Lets the grammar take what was drawn. The rows from the one on whose token it refuses, if any."""
    row, end, _, grammar, drafts = guess
    for at in range(row, end):
        if not grammar.take(drawn[at]):
            return guess._replace(row=at, drafts=drafts[at - row :]) if at > row else guess
        if at + 1 < end and drawn[at] != drafts[at - row]:
            break
    return None


def _drawn_again(ops: Ops, logits: torch.Tensor, refused: list[Guess]) -> list[int]:
    """The best token for the first row of each."""
    found = [guess.grammar.settled for guess in refused]  # what else could it be
    for i, token in enumerate(found):
        if token >= 0 and not math.isfinite(logits[refused[i].row, token].item()):
            found[i] = -1
    several = [guess for guess in refused if guess.grammar.settled < 0]
    if not several:
        return found
    rows = torch.tensor([guess.row for guess in several], dtype=torch.int64)
    words = torch.from_numpy(masks([guess.grammar for guess in several]))
    best = iter(ops.best_allowed(logits, rows, words).tolist())
    return [
        token if guess.grammar.settled >= 0 else next(best)
        for guess, token in zip(refused, found, strict=True)
    ]
