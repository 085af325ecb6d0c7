"""Plans a step: the rules that `scheduler.py` states, over the lanes of `lanes.py`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from octavo.core import beams as beam
from octavo.core.admission import SchedulerLimits
from octavo.core.blocks import BlockManager
from octavo.core.drafting.speculation import Speculation
from octavo.core.intake import MAX_PREEMPTIONS, Intake
from octavo.core.lanes import LaneSet, Mode, Room
from octavo.core.room import Left, tokens_for
from octavo.core.roster import Roster
from octavo.core.sequence import Sequence
from octavo.core.types import ScheduledTokens, StepPlan


class Planner:
    """Decides who runs in a step, and takes the blocks for it.

    shares: whether prompts take over cached blocks and leave theirs in the cache.
    """

    def __init__(
        self,
        roster: Roster,
        blocks: BlockManager,
        limits: SchedulerLimits,
        lanes: LaneSet,
        speculation: Speculation | None = None,
    ) -> None:
        self.roster, self.blocks = roster, blocks
        self.swap = roster.swap
        self._speculation = speculation
        self.running = roster.running
        self._turns = list(lanes.modes)  # the one whose turn it is first
        self.shares = blocks.prefix_caching and lanes.longest_whole is None
        # Whether somebody who runs waits, for blocks that rest or for room in a mixed lane.
        self._short = False
        self._intake = Intake(roster, blocks, limits, self.shares)

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing waits or runs."""
        copies: dict[int, int] = {}  # destination -> source
        preempted: list[str] = []
        turns = self._turns
        self.blocks.begin_step(self.roster.steps + 1)
        self._intake.late = False
        if self.swap is not None:
            self.swap.begin_step()
        mode, decodes, prompts = self._first_mode(copies, preempted)
        while not decodes and not prompts:
            if not self.roster.groups or not (self._intake.late or self.blocks.settle()):
                return None
            self._intake.late = False
            mode, decodes, prompts = self._first_mode(copies, preempted)
        if len(turns) > 1:
            turns.remove(mode)
            turns.append(mode)
        self.roster.steps += 1
        items, lane, lanes = _by_lane(mode, decodes, prompts)
        swap_out, swap_in = self.swap.take_copies() if self.swap is not None else ((), ())
        return StepPlan(
            step=self.roster.steps,
            items=tuple(items),
            copies=tuple((source, target) for target, source in copies.items()),
            preempted=tuple(preempted),
            lane=lane,
            lanes=lanes,
            swap_out=swap_out,
            swap_in=swap_in,
        )

    def _first_mode(
        self, copies: dict[int, int], preempted: list[str]
    ) -> tuple[Mode, list[ScheduledTokens], list[ScheduledTokens]]:
        """The first mode in turn that has something to run, and what `_plan` says of it."""
        for mode in self._turns:
            decodes, prompts = self._plan(mode, copies, preempted)
            if decodes or prompts:
                break
        return mode, decodes, prompts

    def _plan(
        self, mode: Mode, copies: dict[int, int], preempted: list[str]
    ) -> tuple[list[ScheduledTokens], list[ScheduledTokens]]:
        """The items of the lane that decodes and of the one that takes prompts; in a mixed lane both
        are the same list."""
        running, shared = self.running, mode.shared
        places = _places(mode)  # tokens left for decoding, and in a mixed lane for anything
        left = Left(mode, self.roster.slots_taken)
        items: list[ScheduledTokens] = []
        prompts = items if shared else []
        decodes = (
            _count_decoding(running) if shared else 0
        )  # still to be planned, where they compete
        self._short = False
        position = 0
        while position < len(running) and (places > 0 or left.tokens > 0):
            sequence = running[position]
            start = sequence.num_computed
            decoding = sequence.num_tokens - start == 1
            if decoding and start < sequence.writable:  # most sequences of most steps
                position += 1
                decodes -= shared
                if places > 0:
                    items.append(ScheduledTokens(sequence, start, 1, 1))
                    places -= 1
                continue
            decodes -= shared and decoding
            if sequence.beams is not None and sequence.beams.begun:
                position, places = self._plan_beam(
                    sequence, position, places, left, mode, (copies, preempted), items, prompts
                )
                decodes = _count_decoding(running[position:]) if shared else 0
                continue
            apart = not shared and not mode.decodes(sequence)
            if apart:
                item = self._prompt_tokens(sequence, left, mode.prompt)
            else:
                item = tokens_for(
                    sequence, places if decoding else places - decodes, left.rows, mode.decode
                )
            if item is None:  # no room for its tokens or rows of logits beside the others
                # Who is admitted now would decode beside it, and leave it as little room again.
                self._short |= shared
                position += 1
                continue
            already = len(preempted)
            kept = self._reserve(sequence, item, position, copies, preempted)
            if shared and len(preempted) > already:  # who is gone claims no part of the budget
                decodes = _count_decoding(running[position + kept :])
            if not kept:
                # It had to go itself, so that the next one stands at its position, or it waits.
                position += sequence.running
                continue
            position += 1
            if not apart:
                items.append(item)
                places -= item.count
                left.rows -= item.count if item.all_logits else 0
            else:
                prompts.append(item)
                left.take(item)
        if (
            mode.prompt is not None
            and not self._short
            and (not preempted or not (items or prompts))
        ):
            # else whoever was preempted would take the blocks back
            left.tokens = places if shared else left.tokens
            self._intake.admit(prompts, left, mode.prompt)
            if self._speculation is not None and shared:
                self._speculation.extend(
                    items, left.tokens, left.rows, self.blocks, spare=len(running)
                )
        return items, prompts

    def _plan_beam(
        self,
        sequence: Sequence,
        position: int,
        places: int,
        left: Left,
        mode: Mode,
        changes: tuple[dict[int, int], list[str]],
        items: list[ScheduledTokens],
        prompts: list[ScheduledTokens],
    ) -> tuple[int, int]:
        """A step of all beams of a group, planned with the first of them in order, or the next part of
        a beam that is computed again. Returns (next position, places left)."""
        group = sequence.beams
        if group.sources:
            beam.take_over(self.blocks, group)
        if not group.ready:
            return self._plan_rejoining(sequence, position, places, left, mode, items, prompts)
        size = len(group.beams)
        if mode.decode is None or places < size:
            self._short |= mode.shared
            return position + size, places
        copies, preempted = changes
        blocks = self.blocks
        while (need := beam.needed_blocks(self.roster, group)) > blocks.num_free:
            if need <= blocks.num_free + blocks.num_resting:
                self._short = True
                return position + size, places
            victim = self._victim(position)
            own = victim.beams is group
            self.roster.preempt(victim)
            preempted.append(victim.request.id)
            if own:
                return position, places
        beam.take_step_blocks(self.roster, group, copies)
        items.extend(ScheduledTokens(s, s.num_computed, 1, 1) for s in group.sequences())
        return position + size, places - size

    def _plan_rejoining(
        self,
        sequence: Sequence,
        position: int,
        places: int,
        left: Left,
        mode: Mode,
        items: list[ScheduledTokens],
        prompts: list[ScheduledTokens],
    ) -> tuple[int, int]:
        count = beam.next_part(sequence)
        lane = mode.prompt
        if mode.whole and sequence.num_computed:
            lane = mode.decode
        if not count or lane is None:
            return position + 1, places
        into_items = lane is mode.decode
        if not lane.chunked:
            count = min(count, 1 if sequence.num_computed else lane.tokens)
        budget = places if into_items else left.tokens
        if not into_items and not left.seqs:
            return position + 1, places
        wanted, count = count, min(count, budget)
        if count < wanted:
            count = count - count % lane.chunk_multiple if lane.chunked else 0
        if count <= 0:
            self._short |= mode.shared
            return position + 1, places
        item = ScheduledTokens(sequence, sequence.num_computed, count, 0)
        if into_items:
            items.append(item)
            places -= count
        else:
            prompts.append(item)
            left.tokens -= count
            left.seqs -= left.apart
        return position + 1, places

    def _prompt_tokens(
        self, sequence: Sequence, left: Left, lane: Room | None
    ) -> ScheduledTokens | None:
        """Tokens of a running prompt for a batch of prompts only, with rows for what it draws."""
        rows = left.rows - sequence.pending_samples
        if not left.seqs or rows < sequence.wants_prompt_logprobs:
            return None
        return tokens_for(sequence, left.tokens, rows, lane)

    def _reserve(
        self,
        sequence: Sequence,
        item: ScheduledTokens,
        position: int,
        copies: dict[int, int],
        preempted: list[str],
    ) -> bool:
        """Blocks for the tokens of `item`, preempting from the end of `running`. False when the
        sequence itself had to go, or waits for blocks that rest."""
        blocks = self.blocks
        first = item.start // blocks.block_size
        while True:
            need = blocks.blocks_for(item.start + item.count) - sequence.num_blocks
            shared = first < sequence.num_blocks and blocks.is_shared(
                int(sequence.block_table[first])
            )
            if max(need, 0) + shared <= blocks.num_free:
                break
            if max(need, 0) + shared <= blocks.num_free + blocks.num_resting:
                self._short = True
                return False
            victim = self._victim(position)
            self.roster.preempt(victim)
            preempted.append(victim.request.id)
            if victim is sequence:
                return False
        if shared:
            (target,) = blocks.allocate(1)
            source = int(sequence.block_table[first])
            copies[target] = source
            sequence.replace_block(first, target)
            blocks.free([source])
        if need > 0:
            sequence.add_blocks(blocks.allocate(need))
        if item.count == item.samples == 1 and not item.all_logits:  # it decodes from now on
            sequence.writable = sequence.num_blocks * blocks.block_size
        return True

    def _victim(self, position: int) -> Sequence:
        for sequence in reversed(self.running[position:]):
            if sequence.preemptions < MAX_PREEMPTIONS:
                return sequence
        return self.running[position]  # only after a fork: a parent's last block is shared again


def _count_decoding(sequences: SequenceOf[Sequence]) -> int:
    return sum([s.num_tokens - s.num_computed == 1 for s in sequences])


def _places(mode: Mode) -> int:
    """Tokens for decoding in a step of this mode; in a mixed lane for prompts, too."""
    lane = mode.decode
    if lane is None:
        return 0
    return lane.tokens if mode.shared else min(lane.tokens, lane.seqs, lane.rows)


def _by_lane(
    mode: Mode, decodes: list[ScheduledTokens], prompts: list[ScheduledTokens]
) -> tuple[list[ScheduledTokens], int, tuple[tuple[int, int], ...]]:
    """A step's items in the order of its lanes, the first lane, and how many are whose, if two share it."""
    if mode.shared or not decodes or not prompts:
        lane = mode.decode if decodes else mode.prompt
        assert lane is not None
        return decodes or prompts, lane.index, ()
    assert mode.decode is not None and mode.prompt is not None
    both = sorted([(mode.decode.index, decodes), (mode.prompt.index, prompts)], key=lambda x: x[0])
    items = both[0][1] + both[1][1]
    return items, both[0][0], tuple((index, len(part)) for index, part in both)
