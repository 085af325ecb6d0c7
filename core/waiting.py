"""Who waits to run, in which order, and what for.

Sequences wait in order of service (priority, arrival, sample), each for room. One whose next block
a running sequence is computing waits for that block instead of computing it a second time: it is
*parked* until the last block that both share is there, so that it starts once, behind all it can
take over.

- What is being computed is known by *promises*: a sequence that starts promises the full blocks it
  will compute, block by block of its hash chain. A promise ends when the block can be found in the
  cache, or when its maker is preempted, aborted or fails; whoever waited for it then stands in the
  queue again, at its old place, and is looked at anew.
- Only a running sequence makes promises, and it holds all the blocks it needs for them, so a parked
  sequence waits for nobody that waits. A parked one holds nothing itself.
- Later sequences pass a parked one only while it is parked, which happens to it at most
  `MAX_PREFIX_WAITS` times: then it computes for itself whatever is missing.
- A sequence whose prompt log-probabilities are wanted computes every row itself, a few rows a step:
  it neither waits nor promises.
"""

from __future__ import annotations

import heapq
from itertools import islice

from octavo.core.blocks import BlockHash
from octavo.core.sequence import Sequence

MAX_PREFIX_WAITS = 3
_STALE = 64  # entries of ended sequences that the queue carries before it is cleaned


class WaitingQueue:
    """The sequences that do not run. Every operation costs the logarithm of their number at most,
    or is paid for by the blocks it looks at."""

    def __init__(self) -> None:
        # By order of service. Entries of sequences that have ended since are skipped.
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._parked: dict[BlockHash, dict[Sequence, None]] = {}
        self._promises: dict[BlockHash, Sequence] = {}
        self.num_queued = 0
        self.num_parked = 0
        self.held: dict[Sequence, None] = {}  # wait for something outside, in order of arrival
        self.prefix_waits = 0  # since the start

    def __len__(self) -> int:
        return self.num_queued + self.num_parked + len(self.held)

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence that does not run, at its place."""
        sequence.queued = True
        self.num_queued += 1
        heapq.heappush(self._heap, (sequence.key, sequence))

    def hold(self, sequence: Sequence) -> None:
        """Keeps a new sequence out of the queue until `release`; others pass it meanwhile."""
        sequence.held = True
        self.held[sequence] = None

    def release(self, sequence: Sequence) -> None:
        """Queues a held sequence, at its place."""
        del self.held[sequence]
        sequence.held = False
        self.push(sequence)

    def first(self) -> Sequence | None:
        """Who is next, parked ones aside."""
        heap = self._heap
        while heap:
            sequence = heap[0][1]
            if sequence.queued:
                return sequence
            heapq.heappop(heap)
        return None

    def pop(self) -> None:
        """Takes the first from the queue: it starts."""
        _, sequence = heapq.heappop(self._heap)
        sequence.queued = False
        self.num_queued -= 1

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence that ends before it ran."""
        if sequence.queued:
            sequence.queued = False
            self.num_queued -= 1
            if len(self._heap) > 2 * self.num_queued + _STALE:
                self._heap = [entry for entry in self._heap if entry[1].queued]
                heapq.heapify(self._heap)
            return
        if sequence.held:
            sequence.held = False
            del self.held[sequence]
            return
        key = sequence.parked_for
        assert key is not None
        self._unpark(sequence, key)

    # ------------------------------------------------------------------------------- prefixes

    def awaited(self, sequence: Sequence, cached: int, findable: int) -> BlockHash | None:
        """What a sequence should wait for that may take over its first `findable` blocks and would
        find the first `cached` of them: the last of those behind that are being computed without a
        gap. None when the next one is not, or when the sequence has waited often enough."""
        if not self._promises or sequence.prefix_waits >= MAX_PREFIX_WAITS:
            return None
        found = None
        for key in islice(sequence.hashes, cached, findable):
            if key not in self._promises:
                break
            found = key
        return found

    def park(self, key: BlockHash) -> None:
        """Sets the first of the queue aside until `key`, a promised block, is there or given up."""
        _, sequence = heapq.heappop(self._heap)
        sequence.queued = False
        self.num_queued -= 1
        sequence.parked_for = key
        sequence.prefix_waits += 1
        self.prefix_waits += 1
        self._parked.setdefault(key, {})[sequence] = None
        self.num_parked += 1

    def promise(self, sequence: Sequence) -> None:
        """A sequence starts, and will compute its full blocks from `num_computed` on."""
        sequence.num_promised = len(sequence.hashes)
        for key in islice(sequence.hashes, sequence.num_remembered, None):
            self._promises.setdefault(key, sequence)

    def keep(self, sequence: Sequence, key: BlockHash) -> None:
        """The block `key`, which `sequence` has computed, can be found from now on."""
        maker = self._promises.get(key)
        if maker is None:
            return
        if maker is sequence:  # else the maker is still at it, in case this one is evicted
            del self._promises[key]
        self._wake(key)

    def withdraw(self, sequence: Sequence) -> None:
        """A sequence no longer runs: what it has promised and not kept will not come."""
        for i in range(sequence.num_remembered, sequence.num_promised):
            key = sequence.hashes[i]
            if self._promises.get(key) is sequence:
                del self._promises[key]
                self._wake(key)
        sequence.num_promised = 0

    def _wake(self, key: BlockHash) -> None:
        for sequence in list(self._parked.get(key, ())):
            self._unpark(sequence, key)
            self.push(sequence)

    def _unpark(self, sequence: Sequence, key: BlockHash) -> None:
        waiters = self._parked[key]
        del waiters[sequence]
        if not waiters:
            del self._parked[key]
        sequence.parked_for = None
        self.num_parked -= 1

    def check(self, live: list[Sequence]) -> None:
        """Audits the queue against all live sequences.

        Raises:
            AssertionError: what does not hold.
        """
        queued = {id(s) for _, s in self._heap if s.queued}
        parked = {id(s): key for key, waiters in self._parked.items() for s in waiters}
        assert len(queued) == self.num_queued, f"{len(queued)} queue, {self.num_queued} counted"
        assert len(parked) == self.num_parked, f"{len(parked)} parked, {self.num_parked} counted"
        assert not queued & set(parked), "a sequence is queued and parked"
        held = {id(s) for s in self.held}
        assert held == {id(s) for s in live if s.held}, "who is held and who knows it differ"
        assert not held & (queued | set(parked)), "a held sequence is queued or parked"
        waiting = {id(s) for s in live if not s.running}
        assert waiting == queued | set(parked) | held, (
            "who waits and who stands in the queue differ"
        )
        for s in live:
            assert parked.get(id(s)) == s.parked_for, "a parked sequence does not know what for"
        for key in self._parked:
            assert key in self._promises, "a sequence waits for a block that nobody computes"
        running = {id(s) for s in live if s.running}
        for key, maker in self._promises.items():
            kept = maker.hashes[maker.num_remembered : maker.num_promised]
            assert id(maker) in running and key in kept, "a promise outlives its maker"
