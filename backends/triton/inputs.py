"""A step's batch on the device: uploaded in one transfer, when first asked for.

`prepare` makes a `TritonInputs`, which holds the host's arrays and uploads them when an operation first
wants one. Where a decode step runs as a captured graph, `Frame` takes the same arrays to memory that
stays where it is, and the operations read them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from octavo.kernels.triton.attention import DECODE, PREFILL, Shape, Work
from octavo.kernels.triton.attention_plan import FIELDS, cut_tiles
from octavo.plugins import Batch, StepOut

ALIGN = 16
"""Bytes: what the kernels are compiled to expect of every array."""

TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}

PROGRAMS_PER_UNIT = 2
"""Decode programs that a multiprocessor should have at once, to keep enough loads in flight."""


@cache
def workers(device: torch.device) -> int:
    """Attention programs that fill a device."""
    if device.type != "cuda":
        return 16
    return PROGRAMS_PER_UNIT * int(torch.cuda.get_device_properties(device).multi_processor_count)


class Key(NamedTuple):
    """What layers that share work items have in common."""

    shape: Shape
    group: int
    window: int


def place(arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[list[int], int]:
    """Where each array begins in one buffer, in bytes, and the buffer's size."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // ALIGN) * ALIGN
    return offsets, max(end, ALIGN)


def stage(arrays: Sequence[np.ndarray[Any, Any]], pinned: bool) -> tuple[torch.Tensor, list[int]]:
    """The arrays one after another in a host buffer, pinned if it will be copied from asynchronously
    (torch's allocator keeps such a buffer until the copy is done)."""
    offsets, size = place(arrays)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    raw = host.numpy()
    for offset, array in zip(offsets, arrays, strict=True):
        raw[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return host, offsets


def views(
    buffer: torch.Tensor, arrays: Sequence[np.ndarray[Any, Any]], offsets: Sequence[int]
) -> list[torch.Tensor]:
    """Each array's place in the buffer, with its dtype and shape."""
    return [
        buffer[offset : offset + array.nbytes].view(TORCH[array.dtype]).view(array.shape)
        for offset, array in zip(offsets, arrays, strict=True)
    ]


def upload(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, by one transfer that nobody waits for."""
    gpu = device.type == "cuda"
    host, offsets = stage(arrays, gpu)
    return views(host.to(device, non_blocking=True) if gpu else host, arrays, offsets)


@dataclass(slots=True)
class Fields:
    """A batch's tensors on the device."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    logits_rows: torch.Tensor  # [L] int64
    query_start: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32
    slots: tuple[torch.Tensor, ...]  # per group [T] int64
    block_tables: tuple[torch.Tensor, ...]  # per group [S, blocks] int32


def distinct(batch: Batch) -> tuple[list[int], list[int]]:
    """The groups whose arrays are their own, and for each group which of these it shares: groups of one
    kind are given the same arrays."""
    own: list[int] = []
    which: list[int] = []
    for group, table in enumerate(batch.block_tables):
        for index, other in enumerate(own):
            same_slots = batch.slots[other] is batch.slots[group]
            if batch.block_tables[other] is table and same_slots:
                which.append(index)
                break
        else:
            which.append(len(own))
            own.append(group)
    return own, which


def arrays_of(batch: Batch) -> list[np.ndarray[Any, Any]]:
    """What is uploaded of a batch: arrays of fixed sizes first, the groups' block tables last."""
    own, _ = distinct(batch)
    return [
        batch.token_ids.astype(np.int64),
        batch.positions,
        batch.logits_rows.astype(np.int64),
        *(batch.slots[group] for group in own),
        batch.query_start,
        batch.context_lens,
        *(batch.block_tables[group] for group in own),
    ]


def fields_of(
    batch: Batch, fixed: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]
) -> Fields:
    """The tensors made of `arrays_of(batch)` by name; tables: those of its groups with their own."""
    own, which = distinct(batch)
    token_ids, positions, logits_rows = fixed[:3]
    query_start, context_lens = fixed[3 + len(own) : 5 + len(own)]
    return Fields(
        token_ids=token_ids,
        positions=positions,
        logits_rows=logits_rows,
        query_start=query_start,
        context_lens=context_lens,
        slots=tuple(fixed[3 + i] for i in which),
        block_tables=tuple(tables[i] for i in which),
    )


def redirect(token_ids: torch.Tensor, batch: Batch, prev: StepOut | None) -> None:
    """Takes tokens that the step before has drawn from where it left them."""
    if batch.token_src is None or prev is None or prev.tokens is None:
        return
    (source,) = upload([batch.token_src.astype(np.int64)], token_ids.device)
    drawn = prev.tokens[source.clamp_min(0)].to(torch.int64)
    token_ids.copy_(torch.where(source >= 0, drawn, token_ids))


class TritonInputs:
    """The ops' `meta`. Has the attributes of the portable ops' inputs, so that these work on it too."""

    def __init__(self, batch: Batch, prev: StepOut | None, device: str) -> None:
        self.batch, self.prev = batch, prev
        self.device = torch.device(device)
        self.extra: Any = None
        self._fields: Fields | None = None
        self.works: dict[Key, tuple[Work, ...]] = {}

    @property
    def fields(self) -> Fields:
        """The batch on the device, uploaded when this is first asked for."""
        if self._fields is None:
            own = len(distinct(self.batch)[0])
            tensors = upload(arrays_of(self.batch), self.device)
            self._fields = fields_of(self.batch, tensors[:-own], tensors[-own:])
            redirect(self._fields.token_ids, self.batch, self.prev)
        return self._fields

    @property
    def token_ids(self) -> torch.Tensor:
        return self.fields.token_ids

    @property
    def positions(self) -> torch.Tensor:
        return self.fields.positions

    @property
    def logits_rows(self) -> torch.Tensor:
        return self.fields.logits_rows

    @property
    def slots(self) -> tuple[torch.Tensor, ...]:
        return self.fields.slots

    @property
    def block_tables(self) -> tuple[torch.Tensor, ...]:
        return self.fields.block_tables

    def covers_all_rows(self) -> bool:
        """Whether every row of the batch belongs to a sequence's queries."""
        return self.batch.num_tokens == len(self.batch.token_ids)

    def attention(self, key: Key) -> tuple[Work, ...]:
        """The step's attention as work items on the device, cut when a layer first asks."""
        found = self.works.get(key)
        if found is None:
            found = self.works[key] = self._cut(key)
        return found

    def _cut(self, key: Key) -> tuple[Work, ...]:
        batch = self.batch
        queries = np.diff(batch.query_start)
        small, large = (
            key.shape.cut(kernel, workers(self.device), key.window) for kernel in (DECODE, PREFILL)
        )
        few = queries <= small.tokens
        made = []
        for kernel, cut, mask in ((DECODE, small, few), (PREFILL, large, ~few)):
            who = np.flatnonzero(mask & (queries > 0)).astype(np.int32)
            if len(who) == 0:
                continue
            width = batch.block_tables[key.group].shape[1]
            items = cut_tiles(queries, batch.context_lens, width, cut, who)
            on_device, merges = upload([items.items, items.merges], self.device)
            tokens = min(cut.tokens, int(queries[who].max()))
            made.append(Work(kernel, on_device, merges, items.parts, tokens))
        return tuple(made)


# --------------------------------------------------------------------------- memory that stays


def padded_decode(batch: Batch, size: int) -> Batch:
    """A step of one token per sequence, each drawn from, padded to `size` sequences without context."""
    seqs = batch.num_seqs
    if len(batch.token_ids) == seqs == size:
        return batch

    def longer(array: np.ndarray[Any, Any], value: int = 0) -> np.ndarray[Any, Any]:
        out = np.full((size, *array.shape[1:]), value, array.dtype)
        out[:seqs] = array[:seqs]
        return out

    own, which = distinct(batch)
    slots = [longer(batch.slots[group], -1) for group in own]
    tables = [longer(batch.block_tables[group]) for group in own]
    everyone = np.arange(size + 1, dtype=np.int32)
    return Batch(
        num_tokens=seqs,
        num_seqs=seqs,
        token_ids=longer(batch.token_ids),
        positions=longer(batch.positions),
        query_start=everyone,  # a row of padding is a query without keys, whose result is 0
        context_lens=longer(batch.context_lens),
        logits_rows=everyone[:-1],
        slots=tuple(slots[i] for i in which),
        block_tables=tuple(tables[i] for i in which),
        token_src=None if batch.token_src is None else longer(batch.token_src, -1),
        max_query_len=1,
        max_context_len=batch.max_context_len,
    )


def prompt_example(batch: Batch, tokens: int) -> Batch:
    """A step of one prompt without a context and without slots: what it computes means nothing. Groups
    are those of `batch`, which has no tokens."""
    own, which = distinct(batch)
    slots = [np.full(tokens, -1, np.int64) for _ in own]
    tables = [np.zeros((1, 1), np.int32) for _ in own]
    return Batch(
        num_tokens=tokens,
        num_seqs=1,
        token_ids=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int64),
        query_start=np.array([0, tokens], np.int32),
        context_lens=np.zeros(1, np.int32),
        logits_rows=np.zeros(1, np.int32),
        slots=tuple(slots[i] for i in which),
        block_tables=tuple(tables[i] for i in which),
        max_query_len=tokens,
    )


def whole(items: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    """Items or merges, filled up to `rows` with ones that the kernels pass over."""
    out = np.full((rows, FIELDS), -1, np.int32)
    out[: len(items)] = items
    return out


class Frame(TritonInputs):
    """Inputs of a decode step of fixed size, in memory that stays where it is.

    Args:
        first: the inputs of such a step that was run; what its layers asked for is kept up to date.
        blocks: the most blocks that a sequence can have.
    """

    def __init__(self, first: TritonInputs, blocks: int) -> None:
        super().__init__(first.batch, None, str(first.device))
        batch = first.batch
        self._size, self._room = len(batch.token_ids), len(batch.token_ids) * blocks
        self._keys = list(first.works)
        count = workers(self.device)
        self._cuts = [key.shape.cut(DECODE, count, key.window) for key in self._keys]
        own = distinct(batch)[0]
        fixed = self._fixed(batch)
        offsets, self._first_table = place(fixed)
        self._table_bytes = -(-self._room * 4 // ALIGN) * ALIGN
        size = self._first_table + len(own) * self._table_bytes
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
        tensors = views(self._buffer, fixed, offsets)
        tables = [
            self._table(index)[: self._room * 4].view(torch.int32) for index in range(len(own))
        ]
        self._fields = fields_of(batch, tensors, tables)
        items = tensors[5 + len(own) :]
        for i, (key, cut) in enumerate(zip(self._keys, self._cuts, strict=True)):
            work = Work(DECODE, items[2 * i], items[2 * i + 1], parts=cut.most_parts, tokens=1)
            self.works[key] = (work,)

    def _table(self, index: int) -> torch.Tensor:
        start = self._first_table + index * self._table_bytes
        return self._buffer[start : start + self._table_bytes]

    def _fixed(self, batch: Batch) -> list[np.ndarray[Any, Any]]:
        """Arrays whose sizes are the same in every step: the batch's but its tables, then work items."""
        own = len(distinct(batch)[0])
        arrays = arrays_of(batch)[:-own]
        queries = np.diff(batch.query_start)
        for key, cut in zip(self._keys, self._cuts, strict=True):
            width = batch.block_tables[key.group].shape[1]
            found = cut_tiles(queries, batch.context_lens, width, cut)
            arrays.append(whole(found.items, cut.most_items(self._size)))
            arrays.append(whole(found.merges, cut.most_merges))
        return arrays

    def load(self, batch: Batch, prev: StepOut | None) -> None:
        """Takes in a batch of the frame's size, by transfers that nobody waits for.

        Raises:
            ValueError: block tables wider than the frame has room for.
        """
        self.batch = batch
        gpu = self.device.type == "cuda"
        tables = [batch.block_tables[group] for group in distinct(batch)[0]]
        if any(table.size > self._room for table in tables):
            raise ValueError(
                f"block tables {[t.shape for t in tables]} exceed the frame's {self._room} entries"
            )
        host, _ = stage([*self._fixed(batch), tables[0]], gpu)
        self._buffer[: host.numel()].copy_(host, non_blocking=True)
        for index in range(1, len(tables)):
            host, _ = stage([tables[index]], gpu)
            self._table(index)[: host.numel()].copy_(host, non_blocking=True)
        redirect(self.fields.token_ids, batch, prev)

    def covers_all_rows(self) -> bool:
        return True
