"""Random ragged batches over a poisoned cache, and what attention over them must give, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.plugins import Batch

NOWHERE = 10**6
"""A block that no cache has: stands in the unused part of block tables."""


@dataclass
class Ragged:
    """A batch, and each sequence's keys and values [context, Hkv, D] in float32."""

    batch: Batch
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    block: int
    num_blocks: int

    @property
    def queries(self) -> list[int]:
        return [int(n) for n in np.diff(self.batch.query_start)]

    def history(self) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        """A step that writes every sequence's whole context, with its keys and values [T, Hkv, D]."""
        slots = [self._slots(s, np.arange(len(k))) for s, k in enumerate(self.keys)]
        total = sum(map(len, slots))
        batch = Batch(
            num_tokens=total,
            num_seqs=1,
            token_ids=np.zeros(total, np.int32),
            positions=np.zeros(total, np.int64),
            query_start=np.array([0, total], np.int32),
            context_lens=np.array([total], np.int32),
            logits_rows=np.zeros(1, np.int32),
            slots=(np.concatenate(slots),),
            block_tables=(np.zeros((1, 1), np.int32),),
        )
        return batch, torch.cat(self.keys), torch.cat(self.values)

    def _slots(self, sequence: int, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        table = self.batch.block_tables[0][sequence].astype(np.int64)
        return table[positions // self.block] * self.block + positions % self.block


def ragged(
    queries: list[int],
    contexts: list[int],
    kv_heads: int,
    size: int,
    size_v: int | None = None,
    *,
    block: int = 16,
    seed: int = 0,
    padding: int = 0,
) -> Ragged:
    """Sequences with so many query tokens at the end of so much context, their blocks in random order,
    and rows of padding behind them. Unused entries of block tables name a block that does not exist."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    need = [-(-context // block) for context in contexts]
    num_blocks = sum(need) + 4
    order = rng.permutation(np.arange(1, num_blocks))
    table = np.full((len(contexts), max(need) + 2), NOWHERE, np.int32)
    at = 0
    for s, count in enumerate(need):
        table[s, :count] = order[at : at + count]
        at += count
    positions = np.concatenate(
        [np.arange(c - q, c) for q, c in zip(queries, contexts, strict=True)]
    )
    owner = np.repeat(np.arange(len(queries)), queries)
    tokens = len(positions)
    slots = table[owner, positions // block].astype(np.int64) * block + positions % block
    batch = Batch(
        num_tokens=tokens,
        num_seqs=len(queries),
        token_ids=np.zeros(tokens + padding, np.int32),
        positions=np.pad(positions, (0, padding)).astype(np.int64),
        query_start=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
        logits_rows=np.zeros(1, np.int32),
        slots=(np.pad(slots, (0, padding), constant_values=-1),),
        block_tables=(table,),
        max_query_len=max(queries),
        max_context_len=max(contexts),
    )
    keys = [torch.randn(c, kv_heads, size) for c in contexts]
    values = [torch.randn(c, kv_heads, size_v or size) for c in contexts]
    return Ragged(batch, keys, values, block, num_blocks)


def expected(
    case: Ragged,
    q: torch.Tensor,
    dtype: torch.dtype,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T without padding, Hq, Dv] float64 of queries, keys and values rounded to `dtype`."""
    out = []
    starts = case.batch.query_start.tolist()
    for s, count in enumerate(case.queries):
        if count == 0:
            continue
        group = q.shape[1] // case.keys[s].shape[1]
        k, v = (
            x[s].to(dtype).double().repeat_interleave(group, 1) for x in (case.keys, case.values)
        )
        mine, context = q[starts[s] : starts[s + 1]].double(), len(k)
        score = torch.einsum("qhd,khd->hqk", mine, k) * scale
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        at = torch.arange(context - count, context)[:, None]
        key = torch.arange(context)[None]
        hidden = key > at
        if window:
            hidden |= key <= at - window
        score = score.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks.double().view(-1, 1, 1).expand(-1, count, 1)
            weights = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = score.softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(out)
