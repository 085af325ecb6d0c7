"""The batches that a plan's lanes can come to, one of each shape, with nothing but padding in them.

A device that compiles per shape runs them once before the first request: no step compiles after that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from octavo.core.batch import lane_kind
from octavo.core.contract_data import Lane
from octavo.core.types import Batch

Span = tuple[int, int, int]
"""A bucket, and the smallest and largest size that are padded to it."""


def example_batches(lanes: Sequence[Lane], groups: int = 1) -> Iterator[Batch]:
    """One batch for each combination of buckets that a step of these lanes can need.

    All of it is padding: slots are -1, block tables hold the null block, no sequence has a context.
    Where a lane has no buckets for a size, that size is 1.

    Args:
        groups: KV groups.
    """
    whole = not all(lane.chunked for lane in lanes)
    for index, lane in enumerate(lanes):
        for tokens, seqs, blocks, rows in shapes(lane, whole):
            slots, table = np.full(tokens, -1, np.int64), np.zeros((seqs, blocks), np.int32)
            yield Batch(
                num_tokens=0,
                num_seqs=0,
                token_ids=np.zeros(tokens, np.int32),
                positions=np.zeros(tokens, np.int64),
                query_start=np.zeros(seqs + 1, np.int32),
                context_lens=np.zeros(seqs, np.int32),
                logits_rows=np.zeros(rows, np.int32),
                slots=(slots,) * groups,
                block_tables=(table,) * groups,
                lane=index,
                kind=lane_kind(lane) or "mixed",
            )


def shapes(lane: Lane, whole: bool) -> Iterator[tuple[int, int, int, int]]:
    """(tokens, sequences, blocks, rows) as buckets, of all batches that the lane can hold.

    whole: prompts are computed whole, so decode items may be there that are not drawn from."""
    most_tokens = min(lane.max_tokens, max(lane.token_buckets, default=lane.max_tokens))
    most_seqs = min(lane.max_seqs, max(lane.seq_buckets, default=lane.max_seqs))
    decodes = lane.kinds == ("decode",)
    for tokens, seqs, blocks, rows in product(
        _spans(lane.token_buckets, 1, most_tokens),
        _spans(lane.seq_buckets, 1, most_seqs),
        lane.block_buckets or (1,),
        _spans(lane.row_buckets, 0, max(lane.row_buckets, default=most_seqs)),
    ):
        if decodes:  # as many tokens as sequences, and at most as many rows
            most = min(tokens[2], seqs[2]) if whole else min(tokens[2], seqs[2], rows[2])
            possible = max(tokens[1], seqs[1], rows[1]) <= most
        else:
            possible = seqs[1] <= tokens[2]
        if possible:
            yield tokens[0], seqs[0], blocks, rows[0]


def _spans(buckets: Sequence[int], least: int, most: int) -> list[Span]:
    if not buckets:
        return [(1, least, most)]
    lows = [least, *(low + 1 for low, _ in pairwise(buckets))]
    return [
        (size, low, min(size, most)) for size, low in zip(buckets, lows, strict=True) if low <= most
    ]
