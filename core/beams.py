"""Beam search: the W most likely continuations of a prompt, kept side by side.

A request with `use_beam_search` is one group. Its prompt is computed once; then every beam is a
`Sequence` that shares all blocks it can with the others, and all step together. After each step `advance`
takes the best candidates of every beam, and chooses as transformers does (`generate(num_beams=W)`):

- Of the best candidates of all beams, those that end go to the pool if they are among the W best; the
  pool keeps the W highest scores, cumulative log-probability / (length ** length_penalty).
- The W best of those that do not end go on. A beam that has several children is forked; the first child
  takes its place, so a step without a change of parents copies nothing.
- It is over when no beam goes on, or by `early_stopping`: True, as soon as the pool is full; False, when
  the best beam at its present length scores no better than the worst of a full pool; "never", the same
  with the longest possible length where length_penalty favours long texts.

The group has W of the scheduler's places from its admission to its end: the first beam stands for those
that are not there. When blocks run out the whole group waits (`gather`): its first beam stands in the
queue, and the others are kept without blocks. Together they are admitted again (`take_blocks`): each
takes over the full blocks it has in common with an earlier beam, computes the rest, and none draws before
all are there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from octavo.core.outcome import sequence_update, stop_reason
from octavo.core.sequence import Sequence
from octavo.core.types import (
    BeamCandidates,
    FinishReason,
    SamplingParams,
    SequenceUpdate,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from octavo.core.roster import Roster


def penalised(cumulative: float, length: int, length_penalty: float) -> float:
    """A hypothesis's score. length: its output tokens, the one that ended it included."""
    return float(cumulative / length**length_penalty)


@dataclass(slots=True)
class Hypothesis:
    """An ended beam. `tokens`: its whole output."""

    tokens: list[int]
    cumulative: float
    score: float
    reason: FinishReason
    stop: int | None
    entries: list[TokenLogprobs] | None


@dataclass(slots=True, eq=False)
class Beam:
    """A live beam. `entries`: log-probabilities of its tokens, if they are wanted."""

    sequence: Sequence
    cumulative: float = 0.0
    entries: list[TokenLogprobs] | None = None


@dataclass(slots=True, eq=False)
class BeamGroup:
    """A request's beams, best first, and what has ended.

    Attributes:
        sources: while the group is computed again, whose first blocks a beam shares: it waits for them.
    """

    params: SamplingParams
    beams: list[Beam]
    pool: list[Hypothesis] = field(default_factory=list)
    begun: bool = False  # the prompt is computed, the first candidates are taken
    sources: dict[Sequence, Sequence] = field(default_factory=dict)
    num_cached: int = 0

    @property
    def width(self) -> int:
        return self.params.width

    @property
    def leader(self) -> Sequence:
        return self.beams[0].sequence

    def sequences(self) -> list[Sequence]:
        """The live ones in order of service."""
        return sorted((beam.sequence for beam in self.beams), key=lambda s: s.index)

    @property
    def ready(self) -> bool:
        """Whether all beams have one token left to compute: then they step together."""
        return self.begun and all(b.sequence.running and b.sequence.decoding for b in self.beams)

    # ------------------------------------------------------------------------------- choosing

    def choose(
        self, candidates: SequenceOf[BeamCandidates]
    ) -> tuple[list[tuple[Beam, int, float, TokenLogprobs | None]], bool]:
        """(who goes on: parent, token, cumulative log-probability and entry, best first; whether the
        search is over). What ends is put in the pool.

        candidates: of each beam, in the order of `beams`.
        """
        params, width = self.params, self.width
        merged = [
            (beam.cumulative + logprob, place, token, rank)
            for place, (beam, found) in enumerate(zip(self.beams, candidates, strict=True))
            for rank, (token, logprob) in enumerate(zip(found.tokens, found.logprobs, strict=True))
        ]
        merged.sort(key=lambda each: (-each[0], each[1], each[2]))
        length = self.leader.num_output + 1
        alive: list[tuple[Beam, int, float, TokenLogprobs | None]] = []
        for position, (cumulative, place, token, rank) in enumerate(merged):
            beam, entries = self.beams[place], candidates[place].entries
            entry = entries[rank] if entries else None
            reason, stop = _reason_after(beam.sequence, token)
            if reason is None:
                if len(alive) < width:
                    alive.append((beam, token, cumulative, entry))
                continue
            if position >= width:
                continue
            output = beam.sequence.tokens[beam.sequence.num_prompt : beam.sequence.num_tokens]
            self._keep(
                Hypothesis(
                    tokens=[*output.tolist(), token],
                    cumulative=cumulative,
                    score=penalised(cumulative, length, params.length_penalty),
                    reason=reason,
                    stop=stop,
                    entries=None if beam.entries is None else [*beam.entries, *_list(entry)],
                )
            )
        return alive, not alive or self._over(alive[0][2], length)

    def _keep(self, ended: Hypothesis) -> None:
        self.pool.append(ended)
        self.pool.sort(key=lambda each: -each.score)
        del self.pool[self.width :]

    def _over(self, best: float, length: int) -> bool:
        """Whether running beams, the best of which has `length` tokens, cannot change the outcome."""
        params = self.params
        if len(self.pool) < self.width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.leader.max_len - self.leader.num_prompt
        return penalised(best, length, params.length_penalty) <= self.pool[-1].score


def _list(entry: TokenLogprobs | None) -> list[TokenLogprobs]:
    return [] if entry is None else [entry]


def _reason_after(sequence: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
    """Whether `token` would end a sequence behind which it is put."""
    if token not in sequence.ends and sequence.num_tokens + 1 < sequence.max_len:
        return None, None
    sequence.num_tokens += 1  # `stop_reason` looks at a sequence that has the token
    try:
        return stop_reason(sequence, token)
    finally:
        sequence.num_tokens -= 1


# -------------------------------------------------------------------------------- after a step


def advance(
    roster: Roster, group: BeamGroup, rows: dict[Sequence, BeamCandidates | None]
) -> list[SequenceUpdate]:
    """Takes the candidates of a group's beams. Returns the final updates if it is over."""
    now = time.monotonic()
    candidates = [rows[beam.sequence] for beam in group.beams]
    leader = group.leader
    for beam in group.beams:
        timings = beam.sequence.timings
        timings.first_token = timings.first_token or now
        timings.last_token = now
    if not group.begun:
        group.begun = True
        group.num_cached = leader.num_cached
        if group.params.logprobs is not None:
            group.beams[0].entries = []
    found = [each for each in candidates if each is not None]
    if len(found) < len(candidates):
        message = "no token could be chosen: the logits were not finite"
        return roster.finish(leader, [], "error", message)
    alive, over = group.choose(found)
    if over:
        return _end(roster, group)
    roster.counts["output"] += len(alive)
    _replace(roster, group, alive)
    return []


def _replace(
    roster: Roster,
    group: BeamGroup,
    alive: list[tuple[Beam, int, float, TokenLogprobs | None]],
) -> None:
    """Makes the children of the beams the group's beams: forks and releases, with W places taken as
    before."""
    taken, blocks = roster.slots_taken, roster.blocks
    live = roster.groups[group.leader.request.id].live
    parents = {beam for beam, *_ in alive}
    gone = [beam.sequence for beam in group.beams if beam not in parents]
    used = {beam.sequence.index for beam in parents}
    free = iter([i for i in range(group.width) if i not in used])
    successors: list[Beam] = []
    placed: set[Beam] = set()
    children: list[tuple[Sequence, int]] = []
    for parent, token, cumulative, entry in alive:
        entries = None if parent.entries is None else [*parent.entries, *_list(entry)]
        sequence = parent.sequence
        if parent in placed:
            state = sequence.draw_state
            sequence = sequence.fork(next(free), blocks.blocks_for(sequence.num_computed))
            sequence.draw_state = state.fork() if state is not None else None
            sequence.preemptions = parent.sequence.preemptions
            blocks.acquire(sequence.blocks)
        placed.add(parent)
        children.append((sequence, token))
        successors.append(Beam(sequence, cumulative, entries))
    for sequence in gone:
        roster.release(sequence)
        del live[sequence.index]
    for sequence, token in children:
        sequence.append(token)
        if sequence.index not in live:
            live[sequence.index] = sequence
            roster.insert_running(sequence)
    group.beams = successors
    _share_places(group)
    roster.slots_taken = taken


def _share_places(group: BeamGroup) -> None:
    """The first beam stands for those of the W that are not there."""
    for beam in group.beams:
        beam.sequence.pending_samples = 1
    group.leader.pending_samples = group.width - len(group.beams) + 1


def _end(roster: Roster, group: BeamGroup) -> list[SequenceUpdate]:
    """The n best hypotheses as the updates of samples 0 to n - 1."""
    leader = group.leader
    # What ends the request is its best text; a pool that is not full is no error, only a small one.
    best = group.pool[: group.params.n]
    if not best:
        return roster.finish(leader, [], "error", "no beam could go on: all tokens were excluded")
    roster.counts["output"] += sum(len(each.tokens) for each in best) // len(best)
    ends = roster.finish(leader, [], best[0].reason, best[0].stop)
    timings = ends[0].timings
    updates = []
    for index in range(group.params.n):
        each = best[min(index, len(best) - 1)]
        update = sequence_update(
            leader, each.tokens, each.entries, None, timings, each.reason, each.stop, index
        )
        updates.append(
            msgspec.structs.replace(update, cumulative=each.cumulative, score=each.score)
        )
    return updates


# ------------------------------------------------------------------------- places and blocks


def gather(roster: Roster, sequence: Sequence) -> Sequence:
    """Takes the blocks from all beams of a sequence's group but the first; they wait beside it, as no
    part of the roster. Returns the first, which has all the group's places."""
    group: BeamGroup = sequence.beams
    leader = group.leader
    live = roster.groups[leader.request.id].live
    taken = roster.slots_taken
    for beam in group.beams[1:]:
        other = beam.sequence
        if other.running:
            roster.release(other)
            del live[other.index]
        other.num_computed = 0
    group.sources.clear()
    if leader.running:
        roster.slots_taken = taken
    leader.pending_samples = group.width
    return leader


def needed_blocks(roster: Roster, group: BeamGroup) -> int:
    """Blocks that a step of all beams takes at most: new ones and copies of shared ones."""
    blocks, need = roster.blocks, 0
    for beam in group.beams:
        s = beam.sequence
        place = s.num_computed // blocks.block_size
        need += place >= s.num_blocks or blocks.is_shared(int(s.block_table[place]))
    return need


def take_step_blocks(roster: Roster, group: BeamGroup, copies: dict[int, int]) -> None:
    """Takes what `needed_blocks` counted. The last owner of a shared block keeps it."""
    blocks = roster.blocks
    for s in group.sequences():
        place = s.num_computed // blocks.block_size
        if place >= s.num_blocks:
            s.add_blocks(blocks.allocate(1))
        elif blocks.is_shared(int(s.block_table[place])):
            (target,) = blocks.allocate(1)
            source = int(s.block_table[place])
            copies[target] = source
            s.replace_block(place, target)
            blocks.free([source])


def rejoin_needs(group: BeamGroup, block_size: int) -> list[tuple[Sequence, Sequence, int, int]]:
    """Of each beam but the first: itself, an earlier beam, how many of that one's full blocks it can
    take over, and how many new ones it needs. The last token is always computed."""
    found = []
    earlier = [group.leader]
    for beam in group.beams[1:]:
        s = beam.sequence
        best, common = earlier[0], -1
        for other in earlier:
            length = min(s.num_tokens, other.num_tokens) - 1
            differ = np.flatnonzero(s.tokens[:length] != other.tokens[:length])
            same = int(differ[0]) if len(differ) else length
            if same // block_size > common:
                best, common = other, same // block_size
        found.append((s, best, common, -(-s.num_tokens // block_size) - common))
        earlier.append(s)
    return found


def rejoin(
    roster: Roster, group: BeamGroup, needs: list[tuple[Sequence, Sequence, int, int]]
) -> None:
    """The beams run again behind the first, which has its blocks and runs already."""
    blocks = roster.blocks
    taken, live = roster.slots_taken, roster.groups[group.leader.request.id].live
    for s, source, common, new in needs:
        shared = source.block_table[:common].tolist()
        blocks.acquire(shared)
        s.add_blocks(shared)
        s.add_blocks(blocks.allocate(new))
        s.num_computed = common * blocks.block_size
        s.num_remembered, s.num_promised, s.running = common, 0, True
        s.timings.num_recomputed_tokens += s.num_tokens - s.num_computed
        group.sources[s] = source
        live[s.index] = s
        roster.insert_running(s)
    _share_places(group)
    roster.slots_taken = taken


def next_part(sequence: Sequence) -> int:
    """Tokens that a running beam may compute now, before its group steps: all but the last one, as soon
    as the blocks that it shares are computed. Of a prompt that is computed for the first time: all."""
    group: BeamGroup = sequence.beams
    left: int = sequence.num_tokens - sequence.num_computed
    if not group.begun:
        return left
    source = group.sources.get(sequence)
    if source is not None and source.num_computed < sequence.num_computed:
        return 0
    return left - 1
