"""How a step's attention is cut into work items, on the host, once for all layers that look alike.

An item is a tile of query tokens of one sequence against a range of its keys. Few long sequences are
cut along their keys too, so that they fill the chip; `combine_kernel` then merges the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

FIELDS = 8
"""int32 words of an item or a merge: one sector of memory."""

LEAST_KEYS = 256
"""A part is not cut smaller: what merging costs would outweigh it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What the cutting depends on, beside the batch.

    tokens: query tokens of a program's tile; keys: how many keys it takes at a time; programs: how many
    programs each item is launched as (KV heads times tiles of query heads); workers: programs that the
    chip runs at once; window: 0 for none.
    """

    tokens: int
    keys: int
    programs: int
    workers: int
    window: int = 0

    @property
    def slots(self) -> int:
        """Items that fill the chip."""
        return max(1, self.workers // self.programs)

    def most_items(self, tiles: int) -> int:
        """A bound on the items that so many tiles of queries are cut into."""
        return tiles + self.slots

    @property
    def most_parts(self) -> int:
        """A bound on the partial results of a step. A tile that is cut has more keys than one slot's
        share, and its parts are at most twice as many as the slots that its keys would fill."""
        return 2 * self.slots

    @property
    def most_merges(self) -> int:
        return self.slots


@dataclass(frozen=True, slots=True)
class Items:
    """items [I, FIELDS], the longest first, and merges [M, FIELDS], laid out as the kernels read them;
    parts: how many partial results there are."""

    items: Int32
    merges: Int32
    parts: int


def cut_tiles(
    queries: Int32, contexts: Int32, table_width: int, cut: Cut, sequences: Int32 | None = None
) -> Items:
    """The work items of some sequences of a batch.

    Args:
        queries: [S] query tokens of each sequence.
        contexts: [S] tokens in the cache, the queries included.
        table_width: blocks in a row of the batch's block table.
        sequences: which sequences to cut; all by default. Those without queries have no items.
    """
    chosen = np.arange(len(queries), dtype=np.int32) if sequences is None else sequences
    counts = queries[chosen]
    tiles = -(-counts // cut.tokens)
    who = np.repeat(chosen, tiles)
    first_of = np.cumsum(tiles) - tiles
    first = (np.arange(len(who), dtype=np.int32) - np.repeat(first_of, tiles)) * cut.tokens
    before = (contexts - queries)[who]
    end = before + np.minimum(first + cut.tokens, queries[who])
    begin = np.zeros_like(end)
    if cut.window > 0:
        begin = np.maximum(before + first - cut.window + 1, 0) // cut.keys * cut.keys
    steps = -(-(end - begin) // cut.keys)

    share = max(-(-int(steps.sum()) // cut.slots), -(-LEAST_KEYS // cut.keys))
    size = np.maximum(-(-steps // np.maximum(-(-steps // share), 1)), 1)
    parts = np.maximum(-(-steps // size), 1)
    whole = parts == 1
    split_parts = np.where(whole, 0, parts)
    part_of = (np.cumsum(split_parts) - split_parts).astype(np.int32)

    owner = np.repeat(np.arange(len(who)), parts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    keys = (size * cut.keys)[owner]
    start = begin[owner] + index * keys
    stop = np.minimum(start + keys, end[owner])
    items = np.zeros((len(owner), FIELDS), np.int32)
    items[:, 0] = who[owner]
    items[:, 1] = first[owner]
    items[:, 2] = start
    items[:, 3] = stop
    items[:, 4] = who[owner] * table_width
    items[:, 5] = np.where(whole[owner], -1, part_of[owner] + index)
    items = items[np.argsort(start - stop, kind="stable")]

    cut_up = np.flatnonzero(~whole)
    merges = np.zeros((len(cut_up), FIELDS), np.int32)
    merges[:, 0] = who[cut_up]
    merges[:, 1] = first[cut_up]
    merges[:, 2] = part_of[cut_up]
    merges[:, 3] = parts[cut_up]
    return Items(items, merges, int(split_parts.sum()))
