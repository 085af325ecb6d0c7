"""Admission: who of those that wait is started in a step, and with which blocks."""

from __future__ import annotations

from octavo.core import beams as beam
from octavo.core.admission import SchedulerLimits, stored_tokens
from octavo.core.blocks import BlockHash, BlockManager, extend_hashes
from octavo.core.cache_reasons import account_hits
from octavo.core.lanes import Room
from octavo.core.room import Left, tokens_for
from octavo.core.roster import Roster
from octavo.core.sequence import Sequence
from octavo.core.types import ScheduledTokens

MAX_PREEMPTIONS = 3
_MOST_PARKED = 32
"""Waiting sequences that a step may set aside to look behind them: bounds the time it takes."""


class Intake:
    """Takes in who waits, with blocks for all its tokens in hand.

    shares: whether prompts take over cached blocks and leave theirs in the cache.

    Attributes:
        late: somebody has started who has nothing for the lane that starts. Whoever plans resets it.
    """

    def __init__(
        self, roster: Roster, blocks: BlockManager, limits: SchedulerLimits, shares: bool
    ) -> None:
        self._roster, self._blocks, self._limits, self._shares = roster, blocks, limits, shares
        self._swap = roster.swap
        self._running, self._waiting = roster.running, roster.waiting
        self.late = False
        self._rejoining: list[tuple[Sequence, Sequence, int, int]] = []
        self._no_room: tuple[Sequence, int, int] | None = None  # for whom, and when: see `admit`

    def admit(self, items: list[ScheduledTokens], left: Left, lane: Room) -> None:
        """Starts whom the lane that takes prompts has room for, in their order; their first parts are
        appended to `items`, and counted in `left`."""
        waiting, slots, parked = self._waiting, self._limits.max_num_seqs, 0
        roster = self._roster
        while (
            left.tokens > 0
            and left.seqs > 0
            and roster.slots_taken < slots
            and (sequence := waiting.first())
        ):
            # Who found no room finds none before something is given back.
            moment = sequence, self._blocks.frees, roster.slots_taken
            if self._no_room == moment:
                return
            shares = self._shares and not (sequence.wants_prompt_logprobs or sequence.computes_all)
            hits, computed = self._swapped_out(sequence, shares)
            if shares and not hits:
                hits, awaited = self._known_prefix(sequence)
                computed = len(hits) * self._blocks.block_size
                if awaited is not None:
                    if parked == _MOST_PARKED:
                        return
                    waiting.park(awaited)
                    parked += 1
                    continue
            if roster.slots_taken + sequence.pending_samples > slots:
                self._no_room = moment
                return
            rows = left.rows - sequence.pending_samples
            if rows < sequence.wants_prompt_logprobs:
                return
            if not self._has_room(sequence, computed, left.tokens, rows, lane):
                return
            if not self._take_blocks(sequence, hits, computed):
                self._no_room = moment
                return
            # Where prompts are computed whole, their lane sees no tokens that came back from the host.
            sees = lane.chunked or not computed
            item = tokens_for(sequence, left.tokens, rows, lane) if sees else None
            roster.start(sequence)
            if sequence.beams is not None and sequence.beams.begun:
                beam.rejoin(roster, sequence.beams, self._rejoining)
            self._no_room = None
            if shares:
                waiting.promise(sequence)
            if item is None:  # a beam, or blocks from the host: only a decoding token is left
                self.late = True
                continue
            items.append(item)
            left.take(item)

    def _has_room(self, sequence: Sequence, done: int, budget: int, rows: int, lane: Room) -> bool:
        """Whether a waiting sequence that begins with so many computed tokens can begin in what is left of
        this step: with all its tokens, or where it is computed in parts with one of the lane's multiple."""
        wanted = sequence.num_tokens - done
        budget = min(budget, rows) if sequence.wants_prompt_logprobs else budget
        if not lane.chunked:
            wanted = min(wanted, lane.tokens)
        return wanted <= budget or (lane.chunked and lane.chunk_multiple <= budget)

    def _swapped_out(self, sequence: Sequence, shares: bool) -> tuple[list[int], int]:
        """Where the blocks of a sequence are that was swapped out, and how many tokens they hold. Nothing
        where the prefix cache knows all of them: it may know more by now."""
        swapped = sequence.swapped
        if swapped is None or self._swap is None or (shares and not swapped.private):
            return [], 0
        places = self._swap.waiting_places(sequence)
        return places, swapped.computed if places else 0

    def _known_prefix(self, sequence: Sequence) -> tuple[list[int], BlockHash | None]:
        """Where the cached blocks are that a waiting sequence begins with, and which block to wait for that
        a running one is computing behind them. The last token is always computed."""
        size = self._blocks.block_size
        extend_hashes(sequence.hashes, sequence.root, sequence.tokens[: sequence.num_tokens], size)
        findable = (sequence.num_tokens - 1) // size
        hits = (self._swap or self._blocks).lookup(sequence.hashes[:findable])
        return hits, self._waiting.awaited(sequence, len(hits), findable)

    def _take_blocks(self, sequence: Sequence, hits: list[int], computed: int) -> bool:
        """Prefix hits and new blocks for every known token, and room for the neighbours to grow. Of `hits`,
        those on the host (negative, see `Swap`) need new blocks, too."""
        blocks = self._blocks
        target = sequence.num_tokens
        spare = 0
        families = self._roster.families
        if families and beam.bars(families.values(), self._running, sequence, MAX_PREEMPTIONS):
            return False
        if sequence.beams is not None and sequence.beams.begun:
            return self._take_group_blocks(sequence, hits, computed)
        if sequence.preemptions >= MAX_PREEMPTIONS and sequence.beams is None:
            target = stored_tokens(sequence.max_len, sequence.num_prompt)
        elif self._running:
            spare = len(self._running)
        here = [hit for hit in hits if hit > 0]
        need = blocks.blocks_for(target) - len(here)
        if need + blocks.count_free(here) + spare > blocks.num_free:
            return False
        self._begin(sequence, hits, computed, target)
        return True

    def _begin(self, sequence: Sequence, hits: list[int], computed: int, target: int) -> None:
        """Gives a sequence blocks for `target` tokens, of which the first `computed` stand in `hits`."""
        blocks, swapped = self._blocks, sequence.swapped
        known = computed // blocks.block_size if self._shares else 0
        if self._swap is not None:
            sequence.add_blocks(self._swap.bring(sequence, hits, known))
        else:
            blocks.acquire(hits)
            sequence.add_blocks(hits)
        sequence.num_remembered = known
        sequence.add_blocks(blocks.allocate(blocks.blocks_for(target) - len(hits)))
        sequence.num_computed = computed
        if swapped is None:
            account_hits(self._roster, sequence, hits, self._shares)
        else:
            sequence.timings.num_recomputed_tokens += max(0, swapped.computed - computed)

    def _take_group_blocks(self, leader: Sequence, hits: list[int], computed: int) -> bool:
        """Blocks for all known tokens of a group of beams, which run behind its first one."""
        blocks = self._blocks
        needs = beam.rejoin_needs(leader.beams, blocks.block_size)
        here = [hit for hit in hits if hit > 0]
        own = blocks.blocks_for(leader.num_tokens) - len(here)
        need = own + sum(new for *_, new in needs) + len(self._running)
        if need + blocks.count_free(here) > blocks.num_free:
            return False
        self._begin(leader, hits, computed, leader.num_tokens)
        self._rejoining = needs
        return True
