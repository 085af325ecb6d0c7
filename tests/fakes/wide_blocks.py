"""Ragged batches over blocks of 128 tokens, for devices whose attention is laid out for these."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.core.types import Batch

BLOCK = 128
BLOCKS = 16

# (tokens in the cache with this step's, rows of this step) of each sequence
MIXED = ((300, 1), (140, 30), (9, 9), (128, 1), (256, 100))
DECODES = ((300, 1), (1, 1), (129, 1), (128, 1))
STARTS = ((33, 33), (5, 5), (200, 200))
CONTINUED = ((200, 70), (260, 132))


def make_batch(kinds: tuple[tuple[int, int], ...], pad: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    contexts, queries = np.array(kinds).T
    order = rng.permutation(np.arange(1, BLOCKS))
    table = np.zeros((len(kinds) + pad, 4), np.int32)
    at = 0
    for s, context in enumerate(contexts):
        need = -(-int(context) // BLOCK)
        table[s, :need] = order[at : at + need]
        at += need
    positions = np.concatenate([np.arange(c - q, c) for c, q in kinds])
    owner = np.repeat(np.arange(len(kinds)), queries)
    slots = table[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    tokens = len(positions)
    start = np.full(len(kinds) + pad + 1, tokens, np.int32)
    start[: len(kinds) + 1] = np.concatenate([[0], np.cumsum(queries)])
    return Batch(
        num_tokens=tokens,
        num_seqs=len(kinds),
        token_ids=np.zeros(tokens + pad, np.int32),
        positions=np.pad(positions, (0, pad)),
        query_start=start,
        context_lens=np.pad(contexts.astype(np.int32), (0, pad)),
        logits_rows=np.array([0], np.int32),
        slots=(np.pad(slots, (0, pad), constant_values=-1),),
        block_tables=(table,),
    )


def history_of(batch: Batch) -> Batch:
    """A batch that writes all of every sequence's tokens, as prompts."""
    contexts = batch.context_lens[: batch.num_seqs]
    owner = np.repeat(np.arange(batch.num_seqs), contexts)
    positions = np.concatenate([np.arange(c) for c in contexts])
    slots = batch.block_tables[0][owner, positions // BLOCK].astype(np.int64) * BLOCK
    return replace(
        batch,
        num_tokens=len(positions),
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        query_start=np.concatenate([[0], np.cumsum(contexts)]).astype(np.int32),
        slots=(slots + positions % BLOCK,),
    )
