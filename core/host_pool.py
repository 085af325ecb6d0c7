"""Slots of host memory that KV blocks are copied to: who owns them, and what is found in them again.

Two uses share one pool. Blocks of preempted sequences are *pinned*: they stay until their owner runs
again or ends. Full blocks that the device's cache had to give up are kept by the hash they were known
by, and go again least recently used first, as soon as a slot is wanted. A pinned slot may be *promised*:
its block is still cached on the device, and is copied only should it be evicted there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from octavo.core.blocks import BlockAuditError, BlockHash, OutOfBlocks


class HostPool:
    """Hands out slot numbers; knows nothing of memory.

    Args:
        num_slots: how many blocks it holds.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: the last is taken first
        self._pins = [0] * num_slots
        self._filled = [False] * num_slots
        self._key_of: list[BlockHash | None] = [None] * num_slots
        self._slot_of: dict[BlockHash, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._reading: list[int] = []
        self.evictions = 0

    @property
    def num_used(self) -> int:
        """Slots that hold a block, or are promised to one."""
        return self.num_slots - len(self._free)

    @property
    def num_pinned(self) -> int:
        """Slots of sequences that wait."""
        return self.num_used - len(self._evictable)

    def find(self, key: BlockHash) -> int | None:
        """The slot that holds the block with this hash. Changes nothing."""
        slot = self._slot_of.get(key)
        return slot if slot is not None and self._filled[slot] else None

    def filled(self, slot: int) -> bool:
        return self._filled[slot]

    def offer(self, key: BlockHash) -> int | None:
        """The device gives up a block. Returns the slot to copy it to; None: it is there already, or
        no slot is to be had."""
        slot = self._slot_of.get(key)
        if slot is None:
            slot = self._take()
            if slot is None:
                return None
            self._name(slot, key)
            self._evictable[slot] = None
        elif self._filled[slot]:
            if slot in self._evictable:
                self._evictable.move_to_end(slot)
            return None
        self._filled[slot] = True
        return slot

    def wants(self, key: BlockHash) -> bool:
        """Whether a waiting sequence counts on the block with this hash, which is not here yet."""
        slot = self._slot_of.get(key)
        return slot is not None and not self._filled[slot]

    def is_pinned(self, key: BlockHash) -> bool:
        """Whether a waiting sequence has a slot for the block with this hash."""
        slot = self._slot_of.get(key)
        return slot is not None and self._pins[slot] > 0

    def pin(self, key: BlockHash) -> int:
        """One more owner for the slot of a block that is cached, here or on the device.

        Raises:
            OutOfBlocks: every slot is pinned for another.
        """
        slot = self._slot_of.get(key)
        if slot is None:
            slot = self._taken()
            self._name(slot, key)
        self._evictable.pop(slot, None)
        self._pins[slot] += 1
        return slot

    def hold(self) -> int:
        """A pinned slot for a block that has no hash, to copy it to at once.

        Raises:
            OutOfBlocks: every slot is pinned.
        """
        slot = self._taken()
        self._pins[slot] = 1
        self._filled[slot] = True
        return slot

    def unpin(self, slot: int) -> None:
        """One owner less."""
        pins = self._pins[slot] - 1
        if pins < 0:
            raise BlockAuditError(f"host slot {slot} was given back more often than it was taken")
        self._pins[slot] = pins
        if pins:
            return
        if self._key_of[slot] is not None and self._filled[slot]:
            self._evictable[slot] = None
        else:
            self._release(slot)

    def read(self, slot: int) -> None:
        """Keeps a slot as it is until the step that is being planned is done."""
        self._evictable.pop(slot, None)
        self._pins[slot] += 1
        self._reading.append(slot)

    def begin_step(self) -> None:
        """What was read has been read."""
        if self._reading:
            for slot in self._reading:
                self.unpin(slot)
            self._reading.clear()

    def void(self, slot: int) -> None:
        """What was to be copied here never came."""
        self._filled[slot] = False
        if not self._pins[slot] and self._key_of[slot] is not None:
            del self._evictable[slot]
            self._release(slot)

    def _taken(self) -> int:
        slot = self._take()
        if slot is None:
            raise OutOfBlocks(f"all {self.num_slots} blocks of host memory are pinned")
        return slot

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._evictable:
            return None
        slot, _ = self._evictable.popitem(last=False)
        self._release(slot)
        self.evictions += 1
        return self._free.pop()

    def _name(self, slot: int, key: BlockHash) -> None:
        self._key_of[slot] = key
        self._slot_of[key] = slot

    def _release(self, slot: int) -> None:
        key = self._key_of[slot]
        if key is not None:
            del self._slot_of[key]
        self._key_of[slot] = None
        self._filled[slot] = False
        self._free.append(slot)

    def check(self, owned: Iterable[int]) -> None:
        """Audits every invariant against the slots of all sequences that wait; one that two of them
        count on stands there twice.

        Raises:
            BlockAuditError: what does not hold.
        """
        pins = Counter(owned)
        pins.update(self._reading)
        problems = [
            f"host slot {slot}: {pins[slot]} owners, {count} pins"
            for slot, count in enumerate(self._pins)
            if pins[slot] != count
        ]
        free = set(self._free)
        if len(free) != len(self._free):
            problems.append("a host slot is free twice")
        if {key: slot for slot, key in enumerate(self._key_of) if key is not None} != self._slot_of:
            problems.append("the hashes of host slots and their index differ")
        for slot in range(self.num_slots):
            keyed, filled = self._key_of[slot] is not None, self._filled[slot]
            if slot in free and (keyed or filled or self._pins[slot]):
                problems.append(f"host slot {slot} is free and in use")
            if (slot in self._evictable) != (keyed and filled and not self._pins[slot]):
                problems.append(f"host slot {slot} may be taken, or may not, by mistake")
            if slot not in free and not self._pins[slot] and slot not in self._evictable:
                problems.append(f"host slot {slot} has leaked")
            if not keyed and self._pins[slot] > 1 + self._reading.count(slot):
                problems.append(f"host slot {slot} has two owners and no hash")
        if problems:
            raise BlockAuditError("; ".join(problems[:10]))
