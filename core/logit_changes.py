"""What requests do to logits before the draw, in the order that `octavo.core.sampler` tells."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from octavo.core.contract import Ops
from octavo.core.sequence import Ahead
from octavo.core.sequence import Sequence as Seq
from octavo.core.structured import allows, only
from octavo.core.types import Int32, Int64

if TYPE_CHECKING:
    from octavo.core.sampler import DrawState


class Penalties:
    """Which tokens a sequence holds and how often it put them out; grows by a token at a time."""

    def __init__(self, sequence: Seq) -> None:
        prompt = sequence.tokens[: sequence.num_prompt]
        self._place = {int(t): i for i, t in enumerate(np.unique(prompt))}
        self.ids = list(self._place)
        self.counts = [0] * len(self.ids)
        self._seen = sequence.num_prompt

    def advance(self, sequence: Seq | Ahead) -> None:
        for token in sequence.tokens[self._seen : sequence.num_tokens].tolist():
            place = self._place.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0)
            self.counts[place] += 1
        self._seen = sequence.num_tokens


def id_array(values: Sequence[int]) -> Int64:
    """Token ids [n]."""
    return np.array(values, np.int64)


def index_at(index: Any, like: torch.Tensor) -> torch.Tensor:
    """Indices [n] int64 where `like` is."""
    return torch.from_numpy(np.asarray(index, np.int64)).to(like.device)


def change_logits(
    ops: Ops,
    logits: torch.Tensor,
    sequences: Sequence[Seq | Ahead],
    states: list[DrawState],
    changed: list[int],
    guessed: Container[int] = (),
) -> None:
    """Does to rows `changed` of logits [L, V] float32 what their states ask for, in place.

    guessed: those whose grammars are left out; `octavo.core.guesses` sees to them after the draw.
    """
    masks: dict[int, Int32] = {}
    words = np.zeros((0, 0), np.int32)
    ahead: dict[DrawState, Seq] = {}  # whose grammars went ahead over drafts
    for i in changed:
        state, sequence, mask = states[i], sequences[i], None
        grammar = None if i in guessed else state.grammar
        if grammar is not None:
            if isinstance(sequence, Ahead):
                if i - 1 not in masks or not allows(masks[i - 1], sequence.draft):
                    continue  # the draft will not be taken: whatever is drawn behind it is dropped
                ahead[state] = sequence.sequence
            if not masks:
                words = np.empty((len(changed), grammar.words), np.int32)
            grammar.advance(sequence)
            mask = masks[i] = words[len(masks)]
            grammar.fill(mask, mask.ctypes.data)
        if state.changes_without_grammar:
            _change_row(logits[i], sequence, state, mask)
    for state, behind in ahead.items():
        assert state.grammar is not None
        state.grammar.advance(behind)  # back to where it is
    penalised = [i for i in changed if states[i].penalties is not None]
    if penalised:
        _penalise(logits, sequences, states, penalised)
    if masks:
        rows = torch.tensor(list(masks), dtype=torch.int64, device=logits.device)
        ops.mask_logits(logits, rows, torch.from_numpy(words[: len(masks)]).to(logits.device))


def _change_row(
    row: torch.Tensor, sequence: Seq | Ahead, state: DrawState, mask: Int32 | None
) -> None:
    """All but grammar and penalties, to one row [V]. mask: the grammar's, if it has one."""
    if state.allowed is not None:
        allowed = torch.from_numpy(state.allowed).to(row.device)
        kept = row[allowed].clone()
        row.fill_(float("-inf"))
        row[allowed] = kept
    if state.bad_words is not None:
        state.bad_words.advance(sequence.tokens[sequence.num_prompt : sequence.num_tokens].tolist())
        row[index_at(state.bad_words.banned(), row)] = float("-inf")
    early = state.early
    if early is not None and sequence.num_output < sequence.request.params.min_tokens:
        complete = mask is not None and only(mask, early)  # then it ends, though it is short
        if not complete:
            row[index_at(early, row)] = float("-inf")
    if state.bias is not None and state.bias_ids is not None:
        bias = torch.tensor(list(state.bias.values()), dtype=torch.float32, device=row.device)
        row[index_at(state.bias_ids, row)] += bias


def _penalise(
    logits: torch.Tensor,
    sequences: Sequence[Seq | Ahead],
    states: list[DrawState],
    penalised: list[int],
) -> None:
    sizes, ids, counts = [], [], []
    for i in penalised:
        penalties = states[i].penalties
        assert penalties is not None
        penalties.advance(sequences[i])
        sizes.append(len(penalties.ids))
        ids.extend(penalties.ids)
        counts.extend(penalties.counts)

    def spread(name: str) -> torch.Tensor:
        values = [getattr(sequences[i].request.params, name) for i in penalised]
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits.device)

    row = index_at(np.repeat(np.array(penalised, np.int64), sizes), logits)
    column = index_at(id_array(ids), logits)
    count = torch.tensor(counts, dtype=torch.float32, device=logits.device)
    repetition = spread("repetition_penalty")
    values = logits[row, column]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread("frequency_penalty") * count + spread("presence_penalty") * (count > 0)
    logits[row, column] = values
