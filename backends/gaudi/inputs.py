"""A batch as Gaudi's two attentions want it.

Decoding sequences, and prompts, are two rectangles cut out of the batch's rows; a lane's batch has one of them.
Decode attention walks one flat list of all sequences' blocks; prompt attention takes [prompts, rows] padded
to the longest. Each is padded to a power of two, so that the device meets few shapes; the numbers themselves
are in tensors alone.

A batch of padding alone has the shapes that its lane's buckets stand for. The list of B decoding sequences whose
tables are W wide has from B to B · W blocks as a power of two, and the widths go through the powers up to the
widest: so one such batch for each width meets every length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from octavo.backends.buckets import power
from octavo.backends.gaudi.backend import SHORTEST
from octavo.backends.vendor import BLOCK, Upload, placed
from octavo.plugins import Batch

RESERVED = 2
"""Blocks in front of the core's block 0: ZERO is read where a list is padded, SCRATCH written."""

ZERO, SCRATCH = 0, 1


@dataclass(slots=True)
class Decode:
    """Sequences with one query row. N blocks of all of them, padded with ZERO and group -1.

    rows [B] int64: their rows in the batch, None when they are the batch's rows in order.
    """

    rows: torch.Tensor | None
    blocks: torch.Tensor  # [N] int64
    groups: torch.Tensor  # [N] int64, the sequence a block belongs to
    starts: torch.Tensor  # [N] int64, the position of a block's first token
    queries: torch.Tensor  # [N] int64, the position of that sequence's query
    size: int  # B


@dataclass(slots=True)
class Prompts:
    """P sequences with up to Q rows. `table` [P, W] is None when nothing precedes the rows."""

    rows: torch.Tensor  # [P · Q] int64, rows in the batch
    positions: torch.Tensor  # [P, Q] int64; 0 for padding
    lengths: torch.Tensor  # [P] int32, rows of each, 1 for padding
    table: torch.Tensor | None  # [P, W] int64
    whole: bool  # no prompt of these has tokens before its rows


@dataclass(slots=True)
class Group:
    """What one KV group of a batch reads and writes."""

    slots: torch.Tensor  # [T] int64, in the device's own numbering
    begun: torch.Tensor | None  # [n] int64, blocks whose first token is written in this step
    decode: Decode | None
    prompts: Prompts | None


@dataclass(slots=True)
class GaudiInputs:
    """A batch on the device. `restore` [T]: a row's place among the decode rows and then the prompts' rows."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    logits_rows: torch.Tensor  # [L] int64
    empty: bool  # nothing but padding
    groups: tuple[Group, ...]
    restore: torch.Tensor | None
    # Of this step: tables made by the first layer, and keys and values just written, by cache.
    made: dict[Any, Any] = field(default_factory=dict)
    written: list[tuple[Any, torch.Tensor, torch.Tensor]] = field(default_factory=list)


def prepare(batch: Batch, upload: Upload) -> GaudiInputs:
    """Splits and pads a batch and uploads it."""
    starts = batch.query_start[: batch.num_seqs + 1].astype(np.int64)
    counts = np.diff(starts)
    alone = counts == (1 if batch.kind != "prefill" else 0)
    singles, several = np.flatnonzero(alone), np.flatnonzero(~alone & (counts > 0))
    groups: list[Group] = []
    seen: dict[tuple[int, int], Group] = {}
    for slots, table in zip(batch.slots, batch.block_tables, strict=True):
        key = (id(slots), id(table))
        if key not in seen:  # as a rule all groups have the same arrays
            seen[key] = _group(batch, slots, table, starts, singles, several, upload)
        groups.append(seen[key])
    return GaudiInputs(
        token_ids=upload(batch.token_ids),
        positions=upload(batch.positions),
        logits_rows=upload(batch.logits_rows.astype(np.int64)),
        empty=batch.num_seqs == 0,
        groups=tuple(groups),
        restore=_restore(batch, starts, counts, singles, several, upload),
    )


def _group(
    batch: Batch,
    slots: np.ndarray[Any, Any],
    table: np.ndarray[Any, Any],
    starts: np.ndarray[Any, Any],
    singles: np.ndarray[Any, Any],
    several: np.ndarray[Any, Any],
    upload: Upload,
) -> Group:
    first = slots[(slots >= 0) & (slots % BLOCK == 0)] // BLOCK + RESERVED
    begun = None
    if len(first):
        begun = np.full(power(len(first)), SCRATCH, np.int64)
        begun[: len(first)] = first
    decode = prompts = None
    none = not len(singles) and not len(several)
    if len(several) or (none and batch.kind == "prefill"):
        prompts = _prompts(batch, table, starts, several, upload)
    if len(singles) or prompts is None:
        decode = _decode(batch, table, starts, singles, upload)
    return Group(
        upload(placed(slots, SCRATCH, RESERVED)),
        None if begun is None else upload(begun),
        decode,
        prompts,
    )


def _decode(
    batch: Batch,
    table: np.ndarray[Any, Any],
    starts: np.ndarray[Any, Any],
    which: np.ndarray[Any, Any],
    upload: Upload,
) -> Decode:
    tokens, count = len(batch.token_ids), len(which)
    plain = count == batch.num_tokens  # every row of the batch decodes, in order
    size = tokens if plain else power(count)
    rows = None
    if not plain:
        rows = np.zeros(size, np.int64)
        rows[:count] = starts[which]
    lens = batch.context_lens[which].astype(np.int64)
    need = -(-lens // BLOCK)
    total = int(need.sum())
    owner = np.repeat(np.arange(count), need)
    at = np.arange(total) - np.repeat(np.cumsum(need) - need, need)
    room = power(max(1, total)) if count else size * power(table.shape[1])
    blocks = np.full(room, ZERO, np.int64)
    groups = np.full(room, -1, np.int64)
    begin, queries = np.zeros(room, np.int64), np.zeros(room, np.int64)
    blocks[:total] = table[which[owner], at] + RESERVED
    groups[:total], begin[:total] = owner, at * BLOCK
    queries[:total] = (lens - 1)[owner]
    return Decode(
        rows=None if rows is None else upload(rows),
        blocks=upload(blocks),
        groups=upload(groups),
        starts=upload(begin),
        queries=upload(queries),
        size=size,
    )


def _prompts(
    batch: Batch,
    table: np.ndarray[Any, Any],
    starts: np.ndarray[Any, Any],
    which: np.ndarray[Any, Any],
    upload: Upload,
) -> Prompts:
    counts = (starts[which + 1] - starts[which]).astype(np.int64)
    lens = batch.context_lens[which].astype(np.int64)
    tokens = len(batch.token_ids)
    if len(which):
        size, width = power(len(which)), power(int(counts.max()), SHORTEST)
        columns = power(int(-(-lens.max() // BLOCK)))
    else:
        size, width = power(len(batch.context_lens)), power(tokens, SHORTEST)
        columns = power(table.shape[1])
    offset = np.arange(width)
    real = np.zeros((size, width), bool)
    real[: len(which)] = offset < counts[:, None]
    rows, positions = np.zeros((size, width), np.int64), np.zeros((size, width), np.int64)
    rows[: len(which)] = starts[which][:, None] + offset
    positions[: len(which)] = (lens - counts)[:, None] + offset
    rows[~real] = positions[~real] = 0
    lengths = np.ones(size, np.int32)
    lengths[: len(which)] = counts
    places = np.full((size, columns), ZERO, np.int64)
    for i, s in enumerate(which):
        used = -(-int(lens[i]) // BLOCK)
        places[i, :used] = table[s, :used] + RESERVED
    return Prompts(
        rows=upload(rows.reshape(-1)),
        positions=upload(positions),
        lengths=upload(lengths),
        table=upload(places),
        whole=bool((lens == counts).all()),
    )


def _restore(
    batch: Batch,
    starts: np.ndarray[Any, Any],
    counts: np.ndarray[Any, Any],
    singles: np.ndarray[Any, Any],
    several: np.ndarray[Any, Any],
    upload: Upload,
) -> torch.Tensor | None:
    if not len(several):
        return None if batch.kind != "prefill" else upload(np.zeros(len(batch.token_ids), np.int64))
    place = np.zeros(len(batch.token_ids), np.int64)
    place[starts[singles]] = np.arange(len(singles))
    behind = power(len(singles)) if len(singles) else 0
    width = power(int(counts[several].max()), SHORTEST)
    for i, s in enumerate(several):
        first = behind + i * width
        place[starts[s] : starts[s + 1]] = np.arange(first, first + counts[s])
    return upload(place)


# ------------------------------------------------------------------------ what graphs need of them


def tensors(inputs: Any) -> Iterator[torch.Tensor | None]:
    """Every tensor in a fixed order; None stands for one that is absent."""
    for f in fields(inputs):
        value = getattr(inputs, f.name)
        if value is None or isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            for part in value:
                yield from tensors(part)
        elif isinstance(value, (Decode, Prompts)):
            yield from tensors(value)


def signature(inputs: GaudiInputs) -> tuple[Any, ...]:
    """Equal for batches that one captured graph can run."""
    shapes = tuple(None if t is None else tuple(t.shape) for t in tensors(inputs))
    kinds = tuple((g.decode is None, g.prompts is None or g.prompts.whole) for g in inputs.groups)
    return shapes, kinds


def without_begun(inputs: GaudiInputs) -> GaudiInputs:
    """The same once the blocks that this step begins are cleared."""
    return replace(inputs, groups=tuple(replace(g, begun=None) for g in inputs.groups))


def continued(inputs: GaudiInputs) -> GaudiInputs:
    """The same shapes, for prompts that tokens precede."""

    def change(group: Group) -> Group:
        prompts = group.prompts
        return replace(group, prompts=None if prompts is None else replace(prompts, whole=False))

    return replace(inputs, groups=tuple(map(change, inputs.groups)), made={}, written=[])
