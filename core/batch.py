"""StepPlan -> Batch: plain host arrays, padded to the lane's buckets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.contract import Lane
from octavo.core.types import Batch, BatchKind, Int32, Int64, ScheduledTokens, StepPlan


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


def lane_kind(lane: Lane) -> BatchKind | None:
    """The kind of all of a lane's batches; None where each has its own."""
    return lane.kinds[0] if len(lane.kinds) == 1 and lane.kinds[0] != "mixed" else None


def _kind(items: Sequence[ScheduledTokens], decodes: bool) -> BatchKind:
    """What a mixed lane's batch holds. decodes: that all items are one token that is drawn from."""
    if decodes:
        return "decode"
    prompts = [item for item in items if item.count > 1 or item.samples != 1 or item.all_logits]
    return "prefill" if len(prompts) == len(items) else "mixed"


class _Buffers:
    """Arrays for one batch, larger than any built so far, and which block tables stand in them."""

    def __init__(self) -> None:
        self.token_ids: Int32 = np.zeros(0, np.int32)
        self.positions: Int64 = np.zeros(0, np.int64)
        self.slots: Int64 = np.zeros(0, np.int64)
        self.query_start: Int32 = np.zeros(0, np.int32)
        self.context_lens: Int32 = np.zeros(0, np.int32)
        self.logits_rows: Int32 = np.zeros(0, np.int32)
        self.tables: Int32 = np.zeros(0, np.int32)
        self.width = 0
        # By row: `Sequence.table_id` and how many of its blocks were written.
        self.table_ids: list[int] = []
        self.num_blocks: list[int] = []

    def reserve(self, tokens: int, seqs: int, width: int, rows: int) -> None:
        """Room for so much. Arrays are replaced and not resized, so earlier views stay as they are."""
        if tokens > len(self.token_ids):
            size = 2 * tokens
            self.token_ids = np.zeros(size, np.int32)
            self.positions = np.zeros(size, np.int64)
            self.slots = np.zeros(size, np.int64)
        if seqs >= len(self.query_start):
            self.query_start = np.zeros(2 * seqs + 1, np.int32)
            self.context_lens = np.zeros(2 * seqs, np.int32)
        if rows > len(self.logits_rows):
            self.logits_rows = np.zeros(2 * rows, np.int32)
        if seqs * width > len(self.tables):
            self.tables = np.zeros(2 * seqs * width, np.int32)
            self.width = 0
        if width != self.width:  # rows lie elsewhere now
            self.width = width
            self.tables[:] = 0
            self.table_ids, self.num_blocks = [], []

    def fill_tables(self, items: Sequence[ScheduledTokens], seqs: int) -> Int32:
        """The block tables [seqs, width] of `items`, writing only what changed since this buffer was
        last used: as a rule the block that a sequence has just grown into."""
        flat, width, count = self.tables, self.width, len(items)
        ids, sizes = self.table_ids, self.num_blocks
        if (missing := seqs - len(ids)) > 0:
            ids += [0] * missing
            sizes += [0] * missing
        for i, item in enumerate(items):
            sequence = item.sequence
            now, size, written = sequence.table_id, sequence.num_blocks, sizes[i]
            if now == ids[i]:
                if size == written:
                    continue
                first = written
            else:
                first, ids[i] = 0, now
            row = i * width
            flat[row + first : row + size] = sequence.block_table[first:size]
            if written > size:
                flat[row + size : row + written] = 0
            sizes[i] = size
        for i in range(count, seqs):  # padding
            if sizes[i]:
                flat[i * width : i * width + sizes[i]] = 0
                ids[i] = sizes[i] = 0
        table: Int32 = flat[: seqs * width].reshape(seqs, width)
        return table


class BatchBuilder:
    """Gathers the tokens, positions, slots and block tables of one lane's plans.

    A batch's arrays are views of buffers that are used again: they hold until `depth` further batches
    have been built, so that a step may still be running while the next one is built.

    Args:
        groups: KV groups; all have the same slots and tables.
        depth: sets of buffers.
        index: the lane's place in the plan.
    """

    def __init__(
        self, lane: Lane, block_size: int, groups: int = 1, depth: int = 2, index: int = 0
    ) -> None:
        self._index = index
        self._kind = lane_kind(lane)
        self._lane, self._block_size, self._groups = lane, block_size, groups
        self._buffers = [_Buffers() for _ in range(depth)]
        self._built = 0
        self._arange: Int64 = np.arange(1024)

    def build(self, plan: StepPlan) -> Batch:
        """`logits_rows` holds the rows to sample from in the plan's order, then the rows for prompt
        log-probabilities in the plan's order."""
        items, lane = plan.items, self._lane
        seqs = len(items)
        tokens = plan.num_tokens
        rows = _logits_rows(items)
        num_rows = seqs if rows is None else len(rows)
        padded_tokens = bucket(tokens, lane.token_buckets)
        padded_seqs = bucket(seqs, lane.seq_buckets)
        padded_rows = bucket(num_rows, lane.row_buckets)
        width = bucket(max([item.sequence.num_blocks for item in items]), lane.block_buckets)
        while len(self._arange) <= tokens:
            self._arange = np.arange(2 * len(self._arange))
        buffers = self._buffers[self._built % len(self._buffers)]
        self._built += 1
        buffers.reserve(padded_tokens, padded_seqs, width, padded_rows)
        table = buffers.fill_tables(items, padded_seqs)
        token_ids, positions = buffers.token_ids[:padded_tokens], buffers.positions[:padded_tokens]
        slots = buffers.slots[:padded_tokens]
        query_start = buffers.query_start[: padded_seqs + 1]
        context_lens = buffers.context_lens[:padded_seqs]
        logits_rows = buffers.logits_rows[:padded_rows]
        fill = self._fill_prompts if rows is not None else self._fill_decodes
        row_of = fill(items, tokens, token_ids, positions, query_start)
        logits_rows[:num_rows] = self._arange[:seqs] if rows is None else rows
        logits_rows[num_rows:] = 0

        at = positions[:tokens]
        block, offset = np.divmod(at, self._block_size)
        np.multiply(table[row_of, block], self._block_size, out=slots[:tokens], dtype=np.int64)
        slots[:tokens] += offset
        context_lens[:seqs] = at[query_start[1 : seqs + 1] - 1] + 1
        if padded_tokens > tokens:
            token_ids[tokens:] = positions[tokens:] = 0
            slots[tokens:] = -1
        if padded_seqs > seqs:
            query_start[seqs + 1 :] = tokens
            context_lens[seqs:] = 0
        return Batch(
            num_tokens=tokens,
            num_seqs=seqs,
            token_ids=token_ids,
            positions=positions,
            query_start=query_start,
            context_lens=context_lens,
            logits_rows=logits_rows,
            slots=(slots,) * self._groups,
            block_tables=(table,) * self._groups,
            max_query_len=max([item.count for item in items]),
            max_context_len=max([item.start + item.count for item in items]),
            lane=self._index,
            kind=self._kind or _kind(items, rows is None),
            num_rows=num_rows,
        )

    def _fill_decodes(
        self,
        items: Sequence[ScheduledTokens],
        tokens: int,
        token_ids: Int32,
        positions: Int64,
        query_start: Int32,
    ) -> Int64:
        """Every item is a sequence's last token, drawn from once. Returns the row of each token."""
        token_ids[:tokens] = [item.sequence.last_token for item in items]
        positions[:tokens] = [item.start for item in items]
        query_start[: tokens + 1] = self._arange[: tokens + 1]
        return self._arange[:tokens]

    def _fill_prompts(
        self,
        items: Sequence[ScheduledTokens],
        tokens: int,
        token_ids: Int32,
        positions: Int64,
        query_start: Int32,
    ) -> Int64:
        """The same for any items."""
        seqs = len(items)
        counts = np.array([item.count for item in items], np.int64)
        ends = np.cumsum(counts)
        first = np.array([item.start for item in items], np.int64) - (ends - counts)
        np.add(self._arange[:tokens], np.repeat(first, counts), out=positions[:tokens])
        query_start[0] = end = 0
        query_start[1 : seqs + 1] = ends
        singles: list[int] = []
        their_tokens: list[int] = []
        for item in items:
            begin, end = end, end + item.count
            sequence = item.sequence
            if item.samples and item.count == 1:
                singles.append(begin)
                their_tokens.append(sequence.last_token)
            else:
                token_ids[begin:end] = sequence.tokens[item.start : item.start + item.count]
        token_ids[singles] = their_tokens
        return np.repeat(self._arange[:seqs], counts)


def _logits_rows(items: Sequence[ScheduledTokens]) -> list[int] | None:
    """The rows whose logits are wanted; None when each item is one token that is drawn from once."""
    plain = [i for i in items if i.count == 1 == i.samples and not i.all_logits]
    if len(plain) == len(items):
        return None
    rows: list[int] = []
    prompt_rows: list[int] = []
    end = 0
    for item in items:
        end += item.count
        if item.samples == 1:
            rows.append(end - 1)
        elif item.drafts:
            rows.extend(range(end - item.samples, end))
        else:
            rows.extend([end - 1] * item.samples)
        if item.all_logits:
            first = end - item.count - item.start  # the row of position 0
            prompt_rows.extend(first + position for position in prompt_logprob_rows(item))
    return rows + prompt_rows
