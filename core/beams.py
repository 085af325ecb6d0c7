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
queue, and the others are kept without blocks. Together they are admitted again (`rejoin`): each is given
blocks for what it has in common with no earlier beam; it takes over the full blocks that it has in common
once the earlier one has computed them (`take_over`), computes the rest, and none draws before all are there. So nobody
ever writes to a block that has two owners.

A group that alone fits into the pool always ends: it takes no more blocks in a step than its beams then hold
together (`needed_blocks`), which admission has counted. One that was preempted `MAX_PREEMPTIONS` times goes
on only where nobody can take its blocks any more (`bars`): before all others that run, who all can be
preempted, and beside none that comes later and cannot.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from octavo.core.outcome import sequence_update, stop_reason
from octavo.core.params import SamplingParams
from octavo.core.sequence import Sequence
from octavo.core.types import BeamCandidates, FinishReason, SequenceUpdate, TokenLogprobs

if TYPE_CHECKING:
    from octavo.core.beam_text import BeamText
    from octavo.core.blocks import BlockManager
    from octavo.core.roster import Group, Roster


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
    stop: int | str | None
    entries: list[TokenLogprobs] | None


@dataclass(slots=True, eq=False)
class Beam:
    """A live beam. `entries`: log-probabilities of its tokens, if they are wanted. `text`: where stop
    strings may end it."""

    sequence: Sequence
    cumulative: float = 0.0
    entries: list[TokenLogprobs] | None = None
    text: BeamText | None = None


@dataclass(slots=True, eq=False)
class Child:
    """A beam with one token more. `text`: what becomes of its parent's."""

    parent: Beam
    token: int
    cumulative: float
    entry: TokenLogprobs | None
    text: BeamText | None

    def entries(self) -> list[TokenLogprobs] | None:
        """Its parent's and its own."""
        if self.parent.entries is None:
            return None
        return [*self.parent.entries, *([] if self.entry is None else [self.entry])]


@dataclass(slots=True, eq=False)
class BeamGroup:
    """A request's beams, best first, and what has ended.

    Attributes:
        begin_text: makes the first beam's text, for a request with stop strings.
        sources: while the group is computed again, whose full blocks a beam waits for, and how many it
            will take over.
    """

    params: SamplingParams
    beams: list[Beam]
    pool: list[Hypothesis] = field(default_factory=list)
    begin_text: Callable[[], BeamText] | None = None
    begun: bool = False  # the prompt is computed, the first candidates are taken
    sources: dict[Sequence, tuple[Sequence, int]] = field(default_factory=dict)

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

    def choose(self, candidates: SequenceOf[BeamCandidates]) -> tuple[list[Child], bool]:
        """(who goes on, best first; whether the search is over). What ends is put in the pool.

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
        alive: list[Child] = []
        for position, (cumulative, place, token, rank) in enumerate(merged):
            if position >= width and len(alive) == width:
                break
            beam, entries = self.beams[place], candidates[place].entries
            reason, stop, text = _end_after(beam, token)
            child = Child(beam, token, cumulative, entries[rank] if entries else None, text)
            if reason is None:
                if len(alive) < width:
                    alive.append(child)
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
                    entries=child.entries(),
                )
            )
        return alive, not alive or self._over(alive[0].cumulative, length)

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


def _end_after(
    beam: Beam, token: int
) -> tuple[FinishReason | None, int | str | None, BeamText | None]:
    """Whether `token` would end a beam, by which stop token or string, and its text then."""
    sequence, text = beam.sequence, beam.text
    reason: FinishReason | None = None
    stop: int | str | None = None
    if token in sequence.ends or sequence.num_tokens + 1 >= sequence.max_len:
        sequence.num_tokens += 1  # `stop_reason` looks at a sequence that has the token
        try:
            reason, stop = stop_reason(sequence, token)
        finally:
            sequence.num_tokens -= 1
    if text is not None and reason != "stop":  # a token that ends it is no part of its text
        text = text.after(token)
        if text.matched is not None:
            reason, stop = "stop", text.matched
    return reason, stop, text


# -------------------------------------------------------------------------------- after a step


def advance(
    roster: Roster, group: BeamGroup, rows: dict[Sequence, BeamCandidates | None]
) -> list[SequenceUpdate]:
    """Takes the candidates of a group's beams. Returns the final updates if it is over."""
    now = time.monotonic()
    candidates = [rows[beam.sequence] for beam in group.beams]
    leader = group.leader
    timings = leader.timings  # of all beams
    timings.first_token = timings.first_token or now
    timings.last_token = now
    if not group.begun:
        group.begun = True
        if group.params.logprobs is not None:
            group.beams[0].entries = []
        if group.begin_text is not None:
            group.beams[0].text = group.begin_text()
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


def _replace(roster: Roster, group: BeamGroup, alive: list[Child]) -> None:
    """Makes the children of the beams the group's beams: forks and releases, with W places taken as
    before."""
    taken, blocks = roster.slots_taken, roster.blocks
    live = roster.groups[group.leader.request.id].live
    parents = {child.parent for child in alive}
    gone = [beam.sequence for beam in group.beams if beam not in parents]
    used = {beam.sequence.index for beam in parents}
    free = iter([i for i in range(group.width) if i not in used])
    successors: list[Beam] = []
    placed: set[Beam] = set()
    for child in alive:
        parent = child.parent
        sequence = parent.sequence
        if parent in placed:
            state = sequence.draw_state
            sequence = sequence.fork(next(free), blocks.blocks_for(sequence.num_computed))
            sequence.draw_state = state.fork() if state is not None else None
            sequence.preemptions = parent.sequence.preemptions
            sequence.timings = parent.sequence.timings  # a request's, whichever beam is its first
            blocks.acquire(sequence.blocks)
        placed.add(parent)
        successors.append(Beam(sequence, child.cumulative, child.entries(), child.text))
    for sequence in gone:
        roster.release(sequence)
        del live[sequence.index]
    for child, beam in zip(alive, successors, strict=True):
        sequence = beam.sequence
        sequence.append(child.token)
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
    """The n best hypotheses, or as many as there are, as the updates of samples 0, 1, …"""
    leader, asked = group.leader, group.params.n
    # What ends the request is its best text; a pool that is not full is no error, only a small one.
    best = group.pool[:asked]
    if not best:
        return roster.finish(leader, [], "error", "no beam could go on: all tokens were excluded")
    roster.counts["output"] += sum(len(each.tokens) for each in best) // len(best)
    prompt = leader.prompt_logprobs
    ends = roster.finish(leader, [], best[0].reason, best[0].stop)
    updates = []
    for index, each in enumerate(best):
        update = sequence_update(
            *(leader, each.tokens, each.entries, None if index else prompt, ends[0].timings),
            *(each.reason, each.stop, index),
        )
        fewer = None if index or len(best) == asked else len(best)
        updates.append(
            msgspec.structs.replace(
                update, cumulative=each.cumulative, score=each.score, beams=fewer
            )
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
    """Blocks that a step of all beams takes: new ones, and copies of shared ones for all owners but the
    last."""
    blocks, need = roster.blocks, 0
    shared: Counter[int] = Counter()
    for beam in group.beams:
        s = beam.sequence
        place = s.num_computed // blocks.block_size
        if place >= s.num_blocks:
            need += 1
        elif blocks.is_shared(block := int(s.block_table[place])):
            shared[block] += 1
    return need + sum(min(n, blocks.owners(block) - 1) for block, n in shared.items())


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
    """The beams run again behind the first, which has its blocks and runs already. What they have in common
    with others they `take_over` later."""
    blocks = roster.blocks
    taken, live = roster.slots_taken, roster.groups[group.leader.request.id].live
    for s, source, common, new in needs:
        s.add_blocks(blocks.allocate(new))
        s.num_computed = s.num_remembered = s.num_promised = 0
        s.running = True
        s.timings.num_recomputed_tokens += s.num_tokens - common * blocks.block_size
        if common:
            group.sources[s] = source, common
        live[s.index] = s
        roster.insert_running(s)
    _share_places(group)
    roster.slots_taken = taken


def take_over(blocks: BlockManager, group: BeamGroup) -> None:
    """Gives beams that wait for another's blocks those, in front of their own, where they are computed."""
    for s, (source, common) in list(group.sources.items()):
        if source.num_computed < common * blocks.block_size:
            continue
        del group.sources[s]
        shared, own = source.block_table[:common].tolist(), s.blocks
        blocks.acquire(shared)
        s.drop_blocks()
        s.add_blocks(shared)
        s.add_blocks(own)
        s.num_computed = common * blocks.block_size
        s.num_remembered = common


def next_part(sequence: Sequence) -> int:
    """Tokens that a running beam may compute now, before its group steps: all but the last one, unless it
    waits for another's blocks."""
    group: BeamGroup = sequence.beams
    if sequence in group.sources:
        return 0
    left: int = sequence.num_tokens - sequence.num_computed
    return left - 1


# ------------------------------------------------------------------------------------- in its turn


def bars(families: Iterable[Group], running: list[Sequence], sequence: Sequence, most: int) -> bool:
    """Whether a waiting sequence must not start beside those that run, so that a group which was preempted
    `most` times is not preempted again.

    Such a group starts before all that run, and when all of them can be preempted; later nobody starts before
    it, and nobody who cannot be preempted."""
    firm = sequence.preemptions >= most
    if firm and sequence.beams is not None:
        return any(s.key < sequence.key or s.preemptions >= most for s in running)
    for family in families:
        first = next(iter(family.live.values()))
        held = first.running and first.beams is not None and first.preemptions >= most
        if held and (firm or sequence.key < first.key):
            return True
    return False
