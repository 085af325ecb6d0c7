"""Hidden states -> embeddings: each prompt's rows pooled where they were computed, then fetched together.

A prompt that comes in several steps keeps its sum, or its first row, on the device in between, with how
many rows it is of (`Sequence.draw_state`, which nothing else uses: such a sequence draws nothing). Computed
again after a preemption, it begins anew with its first row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.pooling import Pooling
from octavo.core.types import Batch, ScheduledTokens, StepPlan

Float32 = NDArray[np.float32]


def pools(items: Iterable[ScheduledTokens]) -> bool:
    """Whether any of a step's prompts is embedded."""
    return any(item.sequence.request.pooling is not None for item in items)


def pool(part: StepPlan, batch: Batch, hidden: torch.Tensor) -> dict[str, bytes]:
    """The embeddings of the prompts that end in a lane's batch, by request id, as float32 bytes.

    hidden [T, H] are the batch's normed hidden states. A prompt whose embedding is not finite is left out.
    """
    done: list[ScheduledTokens] = []
    vectors: list[torch.Tensor] = []
    ends = batch.query_start.tolist()
    for i, item in enumerate(part.items):
        pooling: Pooling | None = item.sequence.request.pooling
        if pooling is None:
            continue
        vector = _pooled(item, pooling, hidden[ends[i] : ends[i + 1]])
        if vector is not None:
            done.append(item)
            vectors.append(vector)
    if not done:
        return {}
    rows: Float32 = torch.stack(vectors).float().cpu().numpy()
    found = {}
    for item, row in zip(done, rows, strict=True):
        finished = finish(row, item.sequence.request.pooling)
        if finished is not None:
            found[item.sequence.request.id] = finished.tobytes()
    return found


def _pooled(item: ScheduledTokens, pooling: Pooling, rows: torch.Tensor) -> torch.Tensor | None:
    """The pooled vector [H] of a prompt that this item completes, else None; keeps what comes before."""
    sequence = item.sequence
    complete = item.start + item.count == sequence.num_tokens
    if pooling.kind == "last":
        return rows[-1] if complete else None
    before: torch.Tensor | None = None
    if item.start:
        position, before = sequence.draw_state
        assert position == item.start, f"pooled up to {position}, computed up to {item.start}"
    if pooling.kind == "cls":
        # A copy: the step's hidden states go, or are written over.
        vector = rows[0].clone() if before is None else before
    else:
        vector = rows.sum(0, dtype=torch.float32)
        if before is not None:
            vector += before
    if not complete:
        sequence.draw_state = item.start + item.count, vector
        return None
    sequence.draw_state = None
    return vector / sequence.num_tokens if pooling.kind == "mean" else vector


def finish(row: Float32, pooling: Pooling) -> Float32 | None:
    """A pooled vector [H] cut and normalised; None where a number of it is not finite."""
    cut = row[: pooling.dimensions]
    if pooling.normalize or pooling.dimensions is not None:
        # In float64: the squares of large numbers are beyond float32.
        wide = cut.astype(np.float64)
        cut = (wide / max(float(np.linalg.norm(wide)), 1e-12)).astype(np.float32)
    return cut.astype("<f4") if np.isfinite(cut).all() else None
