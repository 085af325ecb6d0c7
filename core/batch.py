"""StepPlan -> Batch: plain host arrays, padded to the lane's buckets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.contract import Lane
from octavo.core.types import Batch, Int32, Int64, ScheduledTokens, StepPlan


def bucket(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`; `size` itself when there are none.

    Raises:
        ValueError: larger than the largest bucket.
    """
    if not buckets:
        return size
    for candidate in buckets:
        if candidate >= size:
            return candidate
    raise ValueError(f"{size} exceeds the lane's largest bucket {max(buckets)}")


def prompt_logprob_rows(item: ScheduledTokens) -> range:
    """Positions of this item whose logits tell the log-probability of the next prompt token."""
    if not item.all_logits or not item.sequence.wants_prompt_logprobs:
        return range(0)
    last = min(item.start + item.count, item.sequence.num_prompt - 1)
    return range(max(item.start, item.sequence.prompt_logprobs_done), last)


def build_batch(plan: StepPlan, lane: Lane, block_size: int, groups: int = 1) -> Batch:
    """Gathers a plan's tokens, positions, slots and block tables.

    `logits_rows` holds the rows to sample from in the plan's order, then the rows for prompt
    log-probabilities in the plan's order.
    """
    items = plan.items
    seqs = len(items)
    counts = np.fromiter((item.count for item in items), np.int64, seqs)
    starts = np.fromiter((item.start for item in items), np.int64, seqs)
    ends = np.cumsum(counts)
    tokens = int(ends[-1])
    padded_tokens = bucket(tokens, lane.token_buckets)
    padded_seqs = bucket(seqs, lane.seq_buckets)
    width = bucket(max(item.sequence.num_blocks for item in items), lane.block_buckets)

    token_ids = np.zeros(padded_tokens, np.int32)
    table: Int32 = np.zeros((padded_seqs, width), np.int32)
    for i, item in enumerate(items):
        sequence = item.sequence
        token_ids[ends[i] - item.count : ends[i]] = sequence.tokens[
            item.start : item.start + item.count
        ]
        table[i, : sequence.num_blocks] = sequence.block_table[: sequence.num_blocks]

    row_of = np.repeat(np.arange(seqs), counts)
    positions = np.zeros(padded_tokens, np.int64)
    positions[:tokens] = np.arange(tokens) + np.repeat(starts - (ends - counts), counts)
    slots: Int64 = np.full(padded_tokens, -1, np.int64)
    at = positions[:tokens]
    slots[:tokens] = table[row_of, at // block_size].astype(np.int64) * block_size + at % block_size

    query_start = np.full(padded_seqs + 1, tokens, np.int32)
    query_start[0] = 0
    query_start[1 : seqs + 1] = ends
    context_lens = np.zeros(padded_seqs, np.int32)
    context_lens[:seqs] = starts + counts
    return Batch(
        num_tokens=tokens,
        num_seqs=seqs,
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        context_lens=context_lens,
        logits_rows=_logits_rows(items, ends),
        slots=(slots,) * groups,
        block_tables=(table,) * groups,
        max_query_len=int(counts.max()),
        max_context_len=int(context_lens.max()),
    )


def _logits_rows(items: Sequence[ScheduledTokens], ends: Int64) -> Int32:
    rows: list[int] = []
    for item, end in zip(items, ends.tolist(), strict=True):
        rows.extend([end - 1] * item.samples)
    for item, end in zip(items, ends.tolist(), strict=True):
        if item.all_logits:
            first = end - item.count - item.start  # the row of position 0
            rows.extend(first + position for position in prompt_logprob_rows(item))
    return np.array(rows, np.int32)
