"""How a step's queries are cut for attention.

A tile holds up to `size` successive queries of one sequence. The number of tiles is fixed by the bucket, so every
step of a bucket runs the same program; which tile works for whom is data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


def tile_count(tokens: int, seqs: int, size: int) -> int:
    """Tiles that any step of so many tokens and sequences fits into."""
    return min(tokens, tokens // size + seqs)


@dataclass(frozen=True, slots=True)
class Tiles:
    """seq, first, end [N]: the tile's sequence, its first query's position and the position after its last (0 for a
    tile without work; those come last). rows [N, size]: tokens of the step. row_of [T]: where each
    token's result lies among the N·size rows; a token of padding looks at row 0."""

    seq: Int32
    first: Int32
    end: Int32
    rows: Int32
    row_of: Int32


def cut(query_start: NDArray[Any], context_lens: NDArray[Any], tokens: int, size: int) -> Tiles:
    """Tiles for sequences with queries [query_start[s], query_start[s + 1]) that end at context_lens[s]."""
    seqs = len(context_lens)
    starts = query_start[:-1].astype(np.int64)
    counts = query_start[1:].astype(np.int64) - starts
    per_seq = -(-counts // size)
    total = int(per_seq.sum())
    count = tile_count(tokens, seqs, size)
    tiles = Tiles(
        np.zeros(count, np.int32),
        np.zeros(count, np.int32),
        np.zeros(count, np.int32),
        np.zeros((count, size), np.int32),
        np.zeros(tokens, np.int32),
    )
    owner = np.repeat(np.arange(seqs), per_seq)
    before = np.cumsum(per_seq) - per_seq
    offset = (np.arange(total) - before[owner]) * size  # of the tile's first query in its sequence
    tiles.seq[:total] = owner
    tiles.first[:total] = context_lens[owner] - counts[owner] + offset
    tiles.end[:total] = np.minimum(tiles.first[:total] + size, context_lens[owner])
    # Rows past a sequence's last query repeat it: they must read something, and nobody reads them.
    inside = np.minimum(offset[:, None] + np.arange(size), counts[owner][:, None] - 1)
    tiles.rows[:total] = starts[owner][:, None] + inside
    token_owner = np.repeat(np.arange(seqs), counts)
    place = np.arange(len(token_owner)) - starts[token_owner]
    tiles.row_of[: len(token_owner)] = (before[token_owner] + place // size) * size + place % size
    return tiles


def write_groups(slots: NDArray[Any], seqs: int, group: int) -> tuple[Int32, Int32]:
    """Which aligned groups of `group` slots a step writes, for a chip that writes no less at once.

    Returns (ids [N], tokens [N, group]): group i covers slots [ids[i]·group, …); tokens names the step's token for
    each slot, -1 where the old row stays. Unused groups have id 0, the null block's, and no tokens.
    """
    count = group_count(len(slots), seqs, group)
    ids = np.zeros(count, np.int32)
    tokens = np.full((count, group), -1, np.int32)
    written = np.flatnonzero(slots >= 0)
    found, inverse = np.unique(slots[written] // group, return_inverse=True)
    ids[: len(found)] = found
    tokens[inverse, slots[written] % group] = written
    return ids, tokens


def group_count(tokens: int, seqs: int, group: int) -> int:
    """Groups that any step of so many tokens and sequences fits into: a sequence's tokens are a run of slots, on
    each page, so of all its groups only the first and last may be in part."""
    return min(tokens, tokens // group + 2 * seqs)
