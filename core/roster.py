"""Which sequences live, which of them run, and the moves between: start, fork, preempt, end.

Every move keeps block ref counts, the queue and the places that `max_num_seqs` counts together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

import msgspec

from octavo.core.beams import gather
from octavo.core.blocks import BlockManager
from octavo.core.outcome import sequence_update
from octavo.core.sequence import Sequence
from octavo.core.sharing import Peak
from octavo.core.stats import SchedulerStats, unfilled_slots
from octavo.core.swap import Swap
from octavo.core.types import FinishReason, MissReason, Request, SequenceUpdate, TokenLogprobs
from octavo.core.waiting import WaitingQueue


@dataclass(slots=True)
class Group:
    """A request's live samples, and those that were aborted before they were forked."""

    request: Request
    live: dict[int, Sequence] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)
    peak: Peak = field(default_factory=Peak)


class Roster:
    """Every live sequence, by request. swap: where there is a host pool for blocks."""

    def __init__(self, blocks: BlockManager, swap: Swap | None = None) -> None:
        self.blocks, self.swap = blocks, swap
        self.running: list[Sequence] = []  # in order of service
        self.waiting = WaitingQueue()
        self.groups: dict[str, Group] = {}
        self.families: dict[str, Group] = {}  # those of beams, or of more than one sample
        self.slots_taken = 0  # sequences running, forks to come included
        self.steps = 0
        self.counts: Counter[str] = Counter()  # of what `stats` tells
        self.misses: dict[MissReason, int] = dict.fromkeys(get_args(MissReason), 0)  # tokens
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}

    def sequences(self) -> Iterator[Sequence]:
        """All live sequences, waiting ones included."""
        for group in self.groups.values():
            yield from group.live.values()

    def indices(self, sequence: Sequence) -> list[int]:
        """The samples a sequence stands for: its own, or before the fork all that are wanted."""
        if sequence.beams is not None:
            return list(range(sequence.request.params.n))
        if sequence.pending_samples == 1:
            return [sequence.index]
        unwanted = self.groups[sequence.request.id].unwanted
        return [i for i in range(sequence.pending_samples) if i not in unwanted]

    # ------------------------------------------------------------------------------------ moves

    def add(self, sequence: Sequence, held: bool = False) -> None:
        """A new request's first sequence waits; held: for more than its turn."""
        request = sequence.request
        self.counts["requests"] += 1
        self.counts["prompt"] += sequence.num_prompt
        self.groups[request.id] = group = Group(request, {0: sequence})
        if request.params.width > 1 or request.params.use_beam_search:
            self.families[request.id] = group
        (self.waiting.hold if held else self.waiting.push)(sequence)

    def start(self, sequence: Sequence) -> None:
        """The first of the queue runs; its blocks are in its table."""
        self.waiting.pop()
        sequence.running = True
        self.slots_taken += sequence.pending_samples
        if not sequence.timings.scheduled:
            sequence.timings.scheduled = time.monotonic()
        self.insert_running(sequence)

    def insert_running(self, sequence: Sequence) -> None:
        """Puts a sequence at its place among those that run."""
        index = len(self.running)
        while index and self.running[index - 1].key > sequence.key:
            index -= 1
        self.running.insert(index, sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence that has no part in this step's plan yet, and so no copy in it, back to
        the queue. Its blocks are kept on the host where that pays."""
        if self.swap is not None:
            self.swap.out(sequence)
        self.suspend(sequence)
        for one in sequence.beams.sequences() if sequence.beams is not None else (sequence,):
            one.preemptions += 1
        sequence.timings.num_preemptions += 1
        self.counts["preemptions"] += 1

    def suspend(self, sequence: Sequence) -> None:
        """A running sequence waits again, without blocks; a beam with its whole group."""
        if sequence.beams is not None:
            sequence = gather(self, sequence)
        self.release(sequence)
        sequence.num_computed = 0
        self.waiting.push(sequence)

    def fork(self, sequence: Sequence, samples: int) -> list[Sequence | None]:
        """The sequence and its siblings, with None for those nobody wants any more."""
        family: list[Sequence | None] = [sequence]
        group = self.groups[sequence.request.id]
        for index in range(1, samples):
            if index in group.unwanted:
                family.append(None)
                continue
            child = sequence.fork(index, self.blocks.blocks_for(sequence.num_computed))
            self.blocks.acquire(child.blocks)
            group.live[index] = child
            self.insert_running(child)
            family.append(child)
        sequence.pending_samples = 1
        if samples > 1:
            self.slots_taken -= len(group.unwanted)
            if 0 in group.unwanted:
                self.slots_taken += 1  # which release gives back
                self.release(sequence)
                del group.live[0]
                family[0] = None
            group.unwanted.clear()
        return family

    def finish(
        self,
        sequence: Sequence,
        tokens: list[int],
        reason: FinishReason,
        stop: int | str | None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> list[SequenceUpdate]:
        """Ends a sequence, and with it the samples that were never forked from it; frees its blocks.

        Returns the last update of each."""
        group = self.groups[sequence.request.id]
        if sequence.beams is not None:
            sequence = gather(self, sequence)
        sequence.timings.finished = time.monotonic()
        indices = self.indices(sequence)
        if sequence.running:
            self.release(sequence)
        else:
            self.waiting.discard(sequence)
            if sequence.swapped is not None:
                assert self.swap is not None
                self.swap.drop(sequence)
        del group.live[sequence.index]
        if not group.live:
            del self.groups[sequence.request.id]
            self.families.pop(sequence.request.id, None)
            self.finished[reason] += 1
        timings = sequence.timings
        group.peak.tell(timings)
        first = sequence_update(
            sequence, tokens, logprobs, prompt_logprobs, timings, reason, stop, indices[0]
        )
        siblings = [
            msgspec.structs.replace(first, index=i, prompt_logprobs=None) for i in indices[1:]
        ]
        return [first, *siblings]

    def release(self, sequence: Sequence) -> None:
        """A running sequence gives up its blocks and its places."""
        self.running.remove(sequence)
        self.slots_taken -= sequence.pending_samples
        sequence.running = False
        if self.swap is not None:
            self.swap.leaving(sequence)
        self.blocks.free(sequence.blocks)
        sequence.drop_blocks()
        self.waiting.withdraw(sequence)

    # ------------------------------------------------------------------------------- looking in

    def stats(self) -> SchedulerStats:
        """Counters, and what holds now."""
        allocated = self.blocks.num_used * self.blocks.block_size
        wasted = unfilled_slots(self.running, self.blocks.block_size)
        counts, swap = self.counts, self.swap
        return SchedulerStats(
            running=len(self.running),
            waiting=len(self.waiting),
            waiting_for_prefix=self.waiting.num_parked,
            kv_blocks_total=self.blocks.usable,
            kv_blocks_used=self.blocks.num_used,
            kv_blocks_cached=self.blocks.num_cached,
            kv_slots_allocated=allocated,
            kv_slots_used=allocated - wasted,
            kv_slots_wasted=wasted,
            steps=self.steps,
            requests=counts["requests"],
            preemptions=counts["preemptions"],
            evictions=self.blocks.evictions,
            prompt_tokens=counts["prompt"],
            output_tokens=counts["output"],
            prefix_query_tokens=counts["query"],
            prefix_hit_tokens=counts["hit"],
            prefix_miss_tokens=dict(self.misses),
            prefix_waits=self.waiting.prefix_waits,
            finished=dict(self.finished),
            host_blocks_total=swap.pool.num_slots if swap else 0,
            host_blocks_used=swap.pool.num_used if swap else 0,
            host_blocks_pinned=swap.pool.num_pinned if swap else 0,
            host_hit_tokens=counts["host_hit"],
            swapped_out_blocks=swap.num_out if swap else 0,
            swapped_in_blocks=swap.num_in if swap else 0,
            swaps=swap.swaps if swap else 0,
        )

    def check(self) -> None:
        """Audits blocks and queues.

        Raises:
            BlockAuditError, AssertionError: what does not hold.
        """
        live = list(self.sequences())
        asked = {name: group.request.params for name, group in self.groups.items()}
        wide = {name for name, p in asked.items() if p.width > 1 or p.use_beam_search}
        assert self.families.keys() == wide, "families are stale"
        self.blocks.check([s.blocks for s in live])
        assert {id(s) for s in self.running} == {id(s) for s in live if s.running}, (
            "running list is stale"
        )
        assert [s.key for s in self.running] == sorted(s.key for s in self.running), (
            "running is out of order"
        )
        self.waiting.check(live)
        if self.swap is not None:
            self.swap.check(live)
        taken = sum(s.pending_samples for s in self.running)
        assert taken == self.slots_taken, f"{taken} slots are taken, {self.slots_taken} counted"
