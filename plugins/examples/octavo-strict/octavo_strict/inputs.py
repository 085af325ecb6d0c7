"""A batch on the device, and all that can be wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from octavo.plugins import Batch
from octavo_strict import chip
from octavo_strict.chip import BLOCK, CHIP, CHUNK, BoundsError, ShapeError, StrictError

Shape = tuple[int, int, int, int]
"""Tokens, sequences, width of the block tables, rows of logits."""


@dataclass(frozen=True, slots=True)
class StrictInputs:
    """T tokens, S sequences, W blocks of a table and L rows of logits, all of them buckets. int64."""

    step: int
    kind: str
    shape: Shape
    num_tokens: int  # without padding
    num_seqs: int
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    sequence: torch.Tensor  # [T], whose token it is; -1: padding
    slots: tuple[torch.Tensor, ...]  # per KV group [T]
    block_tables: tuple[torch.Tensor, ...]  # per KV group [S, W]
    context_lens: torch.Tensor  # [S]
    logits_rows: torch.Tensor  # [L]


def upload(batch: Batch) -> StrictInputs:
    """A batch as tensors of the device.

    Raises:
        ShapeError: a size that is no bucket. StrictError: arrays that contradict each other.
    """
    shape = (
        len(batch.token_ids),
        len(batch.context_lens),
        batch.block_tables[0].shape[1],
        len(batch.logits_rows),
    )
    _check_shape(batch, shape)
    real, seqs = batch.num_tokens, batch.num_seqs
    starts = [int(x) for x in batch.query_start]
    counts = [b - a for a, b in pairwise(starts)]
    if starts[0] or min(counts) < 0 or starts[-1] != real or any(counts[seqs:]):
        raise StrictError(f"query_start {starts} of {seqs} sequences and {real} tokens")
    sequence = torch.full((shape[0],), -1)
    for s in range(seqs):
        _check_sequence(batch, s, starts[s], starts[s + 1])
        sequence[starts[s] : starts[s + 1]] = s
    rows = batch.logits_rows
    if len(rows) and not (rows.min() >= 0 and rows.max() < max(real, 1)):
        raise BoundsError(f"logits_rows {rows.tolist()} of a batch of {real} tokens")
    if (batch.context_lens[seqs:] != 0).any():
        raise StrictError(f"padding has contexts: {batch.context_lens.tolist()}, {seqs} are real")
    for slots in batch.slots:
        if (slots[real:] != -1).any() or (slots[:real] < 0).any():
            raise StrictError(f"slots {slots.tolist()} of {real} tokens: -1 is for padding alone")
    CHIP.step += 1

    def up(array: object) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.int64)

    return StrictInputs(
        step=CHIP.step,
        kind=batch.kind,
        shape=shape,
        num_tokens=real,
        num_seqs=seqs,
        token_ids=up(batch.token_ids),
        positions=up(batch.positions),
        sequence=sequence,
        slots=tuple(up(slots) for slots in batch.slots),
        block_tables=tuple(up(table) for table in batch.block_tables),
        context_lens=up(batch.context_lens),
        logits_rows=up(rows),
    )


def _check_shape(batch: Batch, shape: Shape) -> None:
    prompts = (chip.PROMPT_TOKENS, chip.PROMPT_SEQS, chip.BLOCKS, chip.PROMPT_ROWS)
    decode = (chip.DECODE, chip.DECODE, chip.BLOCKS, chip.DECODE)
    known = {"prefill": prompts, "decode": decode}.get(batch.kind)
    if known is None:
        raise ShapeError(f"a batch of kind {batch.kind!r}; this chip has prefill and decode")
    names = ("tokens", "sequences", "blocks", "rows of logits")
    for size, buckets, name in zip(shape, known, names, strict=True):
        if size not in buckets:
            raise ShapeError(f"{size} {name} in a {batch.kind} batch; this chip has {buckets}")
    if batch.kind == "decode" and (shape[0], shape[3]) != (shape[1], shape[1]):
        raise ShapeError(f"a decode batch of {shape} tokens, sequences, blocks and rows")


def _check_sequence(batch: Batch, s: int, first: int, last: int) -> None:
    """Raises StrictError unless a sequence's positions, slots and context tell the same."""
    positions = batch.positions[first:last]
    count, context = last - first, int(batch.context_lens[s])
    if not count or positions.tolist() != list(range(context - count, context)):
        raise StrictError(f"positions {positions.tolist()} of a sequence of {context} tokens")
    if batch.kind == "decode" and (count != 1 or context == 1):
        raise StrictError(f"{count} tokens of {context} in a decode batch: one of more it must be")
    if batch.kind == "prefill" and (context - count) % CHUNK:
        raise StrictError(f"a prompt goes on at {context - count}, which is no multiple of {CHUNK}")
    for slots, tables in zip(batch.slots, batch.block_tables, strict=True):
        if context > tables.shape[1] * BLOCK:
            raise BoundsError(f"{context} tokens in a table of {tables.shape[1]} blocks")
        wanted = tables[s][positions // BLOCK] * BLOCK + positions % BLOCK
        if (slots[first:last] != wanted).any():
            raise StrictError(f"slots {slots[first:last].tolist()} for {wanted.tolist()}")
