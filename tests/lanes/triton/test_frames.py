"""Decode steps in memory that stays where it is: padding, later steps, groups with tables of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ragged import Ragged, expected, ragged

from octavo.backends.triton.graphs import decode_buckets
from octavo.backends.triton.inputs import Frame, TritonInputs, padded_decode
from octavo.backends.triton.ops import TritonKV, TritonOps
from octavo.plugins import Batch, KVSpec, StepOut

SIZE, HEADS = 32, 4


def test_buckets_end_with_the_most_sequences() -> None:
    assert decode_buckets(1) == (1,)
    assert decode_buckets(3) == (1, 2, 3)
    assert decode_buckets(24) == (1, 2, 4, 8, 12, 16, 20, 24)
    assert decode_buckets(500)[-1] == 500 and decode_buckets(2000)[-1] == 512
    assert decode_buckets(64, most=4) == (1, 2, 4)
    for small, large in zip(decode_buckets(512)[4:], decode_buckets(512)[5:], strict=False):
        assert large - small <= max(4, small / 4)


def two_groups(case: Ragged) -> Batch:
    """The second group's blocks lie elsewhere: behind the first one's."""
    batch = case.batch
    table = batch.block_tables[0].copy()
    moved = np.where(table < case.num_blocks, table + case.num_blocks, table)
    slots = batch.slots[0] + case.num_blocks * case.block
    return replace(
        batch,
        block_tables=(table, moved),
        slots=(batch.slots[0], slots),
        logits_rows=np.arange(batch.num_seqs, dtype=np.int32),
    )


def cache_of(ops: TritonOps, case: Ragged) -> TritonKV:
    """Both groups' blocks, with the keys and values of the second one negated."""
    spec = KVSpec((0,), 1, SIZE, SIZE, "float32")
    handle = ops.alloc_kv([spec], 2 * case.num_blocks, case.block)[0]
    handle.cache.k.fill_(float("nan"))
    handle.cache.v.fill_(float("nan"))
    batch, keys, values = case.history()
    moved = replace(batch, slots=(batch.slots[0] + case.num_blocks * case.block,))
    ops.write_kv(handle, keys, values, TritonInputs(batch, None, "cpu"))
    return ops.write_kv(handle, keys, -values, TritonInputs(moved, None, "cpu"))


def attend(
    ops: TritonOps, handle: TritonKV, meta: TritonInputs, q: torch.Tensor
) -> list[torch.Tensor]:
    full = ops.paged_attention(q, handle, meta, scale=SIZE**-0.5, group=0)
    return [full, ops.paged_attention(q, handle, meta, scale=SIZE**-0.5, group=1, window=20)]


def test_a_frame_holds_later_and_wider_steps() -> None:
    ops = TritonOps("cpu")
    q = torch.randn(4, HEADS, SIZE)
    first = ragged([1, 1], [17, 40], 1, SIZE, seed=1)
    start = TritonInputs(padded_decode(two_groups(first), 4), None, "cpu")
    attend(ops, cache_of(ops, first), start, q)
    frame = Frame(start, blocks=60)
    addresses = [t.data_ptr() for t in (frame.token_ids, *frame.slots, *frame.block_tables)]
    for seed, contexts in enumerate([[3, 90, 20], [700, 5, 6], [1, 2, 3]]):
        case = ragged([1] * 3, contexts, 1, SIZE, seed=seed)
        batch = padded_decode(two_groups(case), 4)
        frame.load(batch, None)
        assert addresses == [
            t.data_ptr() for t in (frame.token_ids, *frame.slots, *frame.block_tables)
        ]
        handle = cache_of(ops, case)
        full, windowed = attend(ops, handle, frame, q)
        wanted = expected(case, q[:3], torch.float32, SIZE**-0.5)
        torch.testing.assert_close(full[:3].double(), wanted, atol=2e-6, rtol=0)
        wanted = -expected(case, q[:3], torch.float32, SIZE**-0.5, window=20)
        torch.testing.assert_close(windowed[:3].double(), wanted, atol=2e-6, rtol=0)
        assert not full[3].any() and not windowed[3].any()
        assert frame.slots[1].tolist() == [*batch.slots[1][:3], -1]


def test_tokens_of_the_step_before_go_into_the_frame() -> None:
    batch = two_groups(ragged([1, 1], [17, 40], 1, SIZE))
    frame = Frame(TritonInputs(padded_decode(batch, 4), None, "cpu"), blocks=8)
    later = replace(batch, token_src=np.array([1, -1], np.int32))
    drawn = StepOut(logits=None, tokens=torch.tensor([7, 8]))
    frame.load(padded_decode(later, 4), drawn)
    assert frame.token_ids.tolist() == [8, 0, 0, 0]


def test_tables_that_do_not_fit_are_refused() -> None:
    batch = two_groups(ragged([1, 1], [17, 40], 1, SIZE))
    frame = Frame(TritonInputs(padded_decode(batch, 2), None, "cpu"), blocks=8)
    wide = two_groups(ragged([1, 1], [17, 400], 1, SIZE))
    with pytest.raises(ValueError, match="exceed the frame's 16 entries"):
        frame.load(padded_decode(wide, 2), None)
