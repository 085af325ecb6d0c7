"""KV blocks that go to host memory and come back, instead of being computed again.

Two things send blocks there:

- A preempted sequence, where copying them out and back is estimated to take less than computing them
  again. What has a hash stays cached on the device as long as it can, and is copied only when it is
  evicted there; the host pool promises it a slot. Its other blocks (the last, partly filled one, or all of
  them where there is no prefix cache) are copied at once. When it runs again it needs no step more than
  if it had never stopped. If the host pool has too few slots, it is computed again.
- The prefix cache. A full block that the device evicts is offered to the host pool, and what a prompt
  begins with is looked up on the device and behind that on the host.

This is bookkeeping: a plan lists the copies, the runner carries them out (`host_store.py`): first those to
the host, of blocks as the step before left them, then copies on the device, then those from the host, then
the step computes. So a block may be reused in the very step in which it leaves, and is read in the one in
which it comes. A slot that a step reads stays as it is until that step is done.

Beams are computed again when their group is preempted (they share most blocks, and come back together);
what their prompts begin with is found on the host as any other prompt's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.core.blocks import BlockAuditError, BlockHash, BlockManager
from octavo.core.host_pool import HostPool
from octavo.core.sequence import Sequence
from octavo.core.types import StepPlan

_SHARE = 0.2  # weight of the newest step in what a prompt's token costs
_ENOUGH = 16  # tokens of a step that tells what a prompt's token costs


@dataclass(slots=True)
class Swapped:
    """What a preempted sequence has waiting for it. `computed`: its tokens in the blocks; `keyed`: pinned
    slots of its first blocks, which are known by hash; `private`: slots of those behind."""

    computed: int
    keyed: list[int]
    private: list[int]

    @property
    def slots(self) -> list[int]:
        return [*self.keyed, *self.private]


class Swap:
    """Decides what goes to the host and what comes back.

    A *place* of a block is its number on the device, or -1 - slot while it is on the host.

    Args:
        mode: of preempted sequences: "recompute", "swap", or "auto", what is estimated to be cheaper.
        block_seconds: what copying a block out and back takes, as measured at the start.
    """

    def __init__(
        self,
        blocks: BlockManager,
        pool: HostPool,
        mode: str,
        block_seconds: float,
    ) -> None:
        self.blocks, self.pool, self.mode = blocks, pool, mode
        self.block_seconds = block_seconds
        self.token_seconds: float | None = None  # of a prompt, as measured since the start
        self._outgoing: dict[int, int] = {}  # slot -> block: of the step that is being planned
        self._incoming: dict[int, int] = {}  # block -> slot: the same
        self.num_out = self.num_in = self.swaps = 0  # blocks, blocks and sequences, since the start
        blocks.offer = self._offer

    # ---------------------------------------------------------------------------------- a plan

    def begin_step(self) -> None:
        """The step before is done."""
        self.pool.begin_step()

    def take_copies(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """(block, slot) of what leaves and (slot, block) of what comes in the step that was planned."""
        leaving = tuple((block, slot) for slot, block in self._outgoing.items())
        coming = tuple((slot, block) for block, slot in self._incoming.items())
        self._outgoing.clear()
        self._incoming.clear()
        self.num_out += len(leaving)
        self.num_in += len(coming)
        return leaving, coming

    def failed(self, plan: StepPlan) -> set[int]:
        """A step may not have copied what it was to copy. Returns the blocks that hold nothing now."""
        for _, slot in plan.swap_out:
            self.pool.void(slot)
        lost = {block for _, block in plan.swap_in}
        for block in lost:
            self.blocks.forget(block)
        return lost

    def reset(self) -> None:
        """The device's cache holds nothing any more; what is on the host stays."""
        for slot in self._outgoing:
            self.pool.void(slot)
        self._outgoing.clear()
        self._incoming.clear()

    # ------------------------------------------------------------------------------- going out

    def out(self, sequence: Sequence) -> bool:
        """A running sequence is about to give up its blocks: keeps them where that pays. Whether it does."""
        blocks, pool = self.blocks, self.pool
        computed, known = sequence.num_computed, sequence.num_remembered
        table: list[int] = sequence.block_table[: blocks.blocks_for(computed)].tolist()
        if not computed or sequence.beams is not None or not self._pays(table, known, computed):
            return False
        if not self._incoming.keys().isdisjoint(table):  # it came only now: nothing is there yet
            return False
        keys = sequence.hashes[:known]
        need = len(table) - sum(pool.is_pinned(key) for key in keys)
        if need > pool.num_slots - pool.num_pinned:
            return False
        for block, key in zip(table, keys, strict=False):
            blocks.remember(block, key)  # a twin of it that was known may have gone since
        private = [pool.hold() for _ in table[known:]]
        sequence.swapped = Swapped(computed, [pool.pin(key) for key in keys], private)
        self._outgoing.update(zip(private, table[known:], strict=True))
        self.swaps += 1
        sequence.timings.num_swaps += 1
        return True

    def _pays(self, table: list[int], known: int, computed: int) -> bool:
        """Whether copying a sequence's blocks is cheaper than computing them again. Blocks that others
        hold stay where they are in either case."""
        if self.mode != "auto" or self.token_seconds is None:
            return self.mode != "recompute"
        shared = sum(self.blocks.is_shared(block) for block in table[:known])
        lost = computed - shared * self.blocks.block_size
        return (len(table) - shared) * self.block_seconds < lost * self.token_seconds

    def drop(self, sequence: Sequence) -> None:
        """A sequence does without what waits for it: it ends, or has taken it, or cannot use it."""
        for slot in sequence.swapped.slots:
            self.pool.unpin(slot)
        sequence.swapped = None

    def leaving(self, sequence: Sequence) -> None:
        """A sequence gives up its blocks: what was to come for it alone in this step need not come."""
        if not self._incoming:
            return
        for block in sequence.blocks:
            if block in self._incoming and self.blocks.is_private(block):
                del self._incoming[block]

    def _offer(self, block: int, key: BlockHash) -> None:
        """The device evicts a block, to be written anew in this step."""
        self._incoming.pop(block, None)  # it would have come in this step: it still is on the host
        size = self.blocks.block_size
        dear = self.token_seconds is not None and (
            self.block_seconds >= size * self.token_seconds and self.mode != "swap"
        )
        if dear and not self.pool.wants(key):
            return
        slot = self.pool.offer(key)
        if slot is not None:
            self._outgoing[slot] = block

    # ------------------------------------------------------------------------------ coming back

    def lookup(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The places of the longest known prefix of `hashes`. Changes nothing."""
        found = []
        for key in hashes:
            place = self.blocks.find(key)
            if place is None:
                slot = self.pool.find(key)
                if slot is None:
                    break
                place = -1 - slot
            found.append(place)
        return found

    def waiting_places(self, sequence: Sequence) -> list[int]:
        """The places of all blocks of a sequence that was swapped out. None at all where one is lost: then
        it is as one that was not."""
        swapped: Swapped = sequence.swapped
        found = self.lookup(sequence.hashes[: len(swapped.keyed)])
        if len(found) < len(swapped.keyed) or not all(map(self.pool.filled, swapped.private)):
            self.drop(sequence)
            return []
        return [*found, *(-1 - slot for slot in swapped.private)]

    def bring(self, sequence: Sequence, places: list[int], known: int) -> list[int]:
        """Makes the blocks at these places the first of a starting sequence's table: takes over those on
        the device, and has the others copied into new ones. `known`: how many have a hash.

        Raises:
            OutOfBlocks: too few are free; the caller looks first.
        """
        blocks = self.blocks
        blocks.acquire([place for place in places if place > 0])
        slots = [-1 - place for place in places if place < 0]
        for slot in slots:  # before anything is evicted into one of them
            self.pool.read(slot)
        new = iter(blocks.allocate(len(slots)))
        table = []
        for i, place in enumerate(places):
            block = place if place > 0 else next(new)
            table.append(block)
            if place < 0:
                self._incoming[block] = -1 - place
                if i < known:
                    blocks.remember(block, sequence.hashes[i])
        if sequence.swapped is not None:
            self.drop(sequence)
        return table

    # ------------------------------------------------------------------------------- looking in

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learns from a step what a token of a prompt costs."""
        tokens = plan.num_tokens
        if plan.swap_in or plan.swap_out or tokens < _ENOUGH:
            return
        if not any(item.count - item.drafts > 1 for item in plan.items):
            return
        each, before = seconds / tokens, self.token_seconds
        self.token_seconds = each if before is None else before + _SHARE * (each - before)

    def check(self, live: Iterable[Sequence]) -> None:
        """Audits the host pool against all live sequences.

        Raises:
            BlockAuditError: what does not hold.
        """
        owned = []
        for sequence in live:
            if sequence.swapped is not None:
                if sequence.running:
                    raise BlockAuditError(f"{sequence.request.id} runs, and is swapped out")
                owned += sequence.swapped.slots
        self.pool.check(owned)
