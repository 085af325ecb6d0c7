"""A batch as Ascend's operations want it: lengths as Python lists and host tensors, tables and slots as int32.

The lengths are read by the host when a call is launched, so they are never on the device; where a call is
replayed from a graph they are patched into it (`graphs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from octavo.backends.vendor import Upload, placed
from octavo.core.ops import TorchInputs
from octavo.plugins import Batch

SCRATCH = 0
"""The block in front of the core's block 0 that padding rows write to and read from."""

RESERVED = 1


@dataclass(slots=True)
class Step:
    """What stands beside the tensors of a batch.

    decode: every sequence has one row, in order; the lengths then have an entry for each row of the batch,
    1 for padding. Otherwise they have one for each sequence with rows, which begin at the batch's first row.
    """

    decode: bool
    query_ends: list[int]  # cumulative
    kv_lengths: list[int]
    host_lengths: torch.Tensor  # the same, int32 on the host
    tables: tuple[torch.Tensor, ...]  # per KV group [sequences, W] int32
    num_rows: int  # of logits, without padding
    host_bound: bool = False  # an operation read lengths in Python: a graph would freeze them
    made: dict[Any, Any] = field(default_factory=dict)  # cosines and sines of this step, by table


def step_of(inputs: TorchInputs) -> Step:
    step: Step = inputs.extra
    return step


def prepare(batch: Batch, upload: Upload) -> TorchInputs:
    """Uploads a batch."""
    starts = batch.query_start[: batch.num_seqs + 1].astype(np.int64)
    counts = np.diff(starts)
    rows = len(batch.token_ids)
    decode = batch.num_tokens == batch.num_seqs and bool((counts == 1).all())
    shifted = [table + np.int32(RESERVED) for table in batch.block_tables]
    if decode:
        lengths = np.ones(rows, np.int32)
        lengths[: batch.num_seqs] = batch.context_lens[: batch.num_seqs]
        ends = np.arange(1, rows + 1)
        tables = [np.full((rows, t.shape[1]), SCRATCH, np.int32) for t in shifted]
        for mine, theirs in zip(tables, shifted, strict=True):
            mine[: batch.num_seqs] = theirs[: batch.num_seqs]
    else:
        with_rows = np.flatnonzero(counts > 0)
        lengths = batch.context_lens[with_rows].astype(np.int32)
        ends = starts[with_rows + 1]
        tables = [t[with_rows] for t in shifted]
    up_tables = tuple(upload(t) for t in tables)
    logits_rows = np.asarray(batch.logits_rows, np.int64)
    num_rows = len(logits_rows)
    if decode and num_rows < rows:  # one shape for each bucket of rows
        logits_rows = np.pad(logits_rows, (0, rows - num_rows))
    return TorchInputs(
        batch=batch,
        token_ids=upload(batch.token_ids.astype(np.int64)),
        positions=upload(np.asarray(batch.positions, np.int64)),
        slots=tuple(
            upload(placed(slots, SCRATCH, RESERVED).astype(np.int32)) for slots in batch.slots
        ),
        block_tables=tuple(upload(t) for t in shifted),
        logits_rows=upload(logits_rows),
        extra=Step(
            decode=decode,
            query_ends=ends.tolist(),
            kv_lengths=lengths.tolist(),
            host_lengths=torch.from_numpy(lengths),
            tables=up_tables,
            num_rows=num_rows,
        ),
    )
