"""Sizes to which batches are padded on devices that compile or capture a program for each shape."""

from __future__ import annotations


def powers(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """smallest, twice that, and so on, up to the first that holds `largest`: a batch is padded to less
    than twice its size, and there are few shapes."""
    found = [smallest]
    while found[-1] < largest:
        found.append(2 * found[-1])
    return tuple(found)


def power(size: int, smallest: int = 1) -> int:
    """The bucket of `size` among `powers`."""
    return powers(size, smallest)[-1]
