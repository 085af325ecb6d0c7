"""Allocators that give each sequence one contiguous chunk: what KV caches did before paging."""

from __future__ import annotations

from typing import Protocol

Chunk = tuple[int, int]
"""(first slot, slots)."""


class Allocator(Protocol):
    """Hands out runs of slots of a pool.

    `free` is what is not handed out, wherever it lies; `largest` what `take` could give at most
    when nothing is handed out.
    """

    free: int
    largest: int

    def take(self, size: int) -> Chunk | None:
        """A chunk of at least `size` slots, or None when no hole is large enough."""
        ...

    def give(self, chunk: Chunk) -> None:
        """Takes a chunk back."""
        ...


class FirstFit:
    """The lowest hole that is large enough; chunks are exactly as large as asked for."""

    def __init__(self, slots: int) -> None:
        self.free = self.largest = slots
        self._holes: list[Chunk] = [(0, slots)]  # by address, never touching each other

    def take(self, size: int) -> Chunk | None:
        """As `Allocator.take`."""
        for i, (start, length) in enumerate(self._holes):
            if length >= size:
                left = [(start + size, length - size)] if length > size else []
                self._holes[i : i + 1] = left
                self.free -= size
                return start, size
        return None

    def give(self, chunk: Chunk) -> None:
        """As `Allocator.give`."""
        self.free += chunk[1]
        merged: list[Chunk] = []
        for start, length in sorted([*self._holes, chunk]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._holes = merged


class Buddy:
    """Chunks are powers of two, split in halves and merged with the other half (Knowlton 1965).

    A pool whose size is no power of two is the powers of two that add up to it, the largest first.
    """

    def __init__(self, slots: int) -> None:
        self.free = slots
        self.largest = 1 << (slots.bit_length() - 1)
        self._holes: list[set[int]] = [set() for _ in range(slots.bit_length())]  # by log2 of size
        start = 0
        for order in reversed(range(slots.bit_length())):
            if slots >> order & 1:
                self._holes[order].add(start)
                start += 1 << order

    def take(self, size: int) -> Chunk | None:
        """As `Allocator.take`; the chunk is `size` rounded up to a power of two."""
        order = (size - 1).bit_length()
        for larger in range(order, len(self._holes)):
            if self._holes[larger]:
                start = min(self._holes[larger])
                self._holes[larger].remove(start)
                for half in reversed(range(order, larger)):
                    self._holes[half].add(start + (1 << half))
                self.free -= 1 << order
                return start, 1 << order
        return None

    def give(self, chunk: Chunk) -> None:
        """As `Allocator.give`."""
        start, size = chunk
        self.free += size
        order = size.bit_length() - 1
        while start ^ (1 << order) in self._holes[order]:
            self._holes[order].remove(start ^ (1 << order))
            start &= ~(1 << order)
            order += 1
        self._holes[order].add(start)


ALLOCATORS: dict[str, type[Buddy] | type[FirstFit]] = {"buddy": Buddy, "first-fit": FirstFit}
