"""The shapes that are run at the start are those that steps have: all of them, and not many more."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from scenarios import LANE_SHAPES, random_lanes, random_scenario, scenario_request
from support import rig

from octavo.core.contract import Lane
from octavo.core.params import RequestRefused
from octavo.core.types import Batch
from octavo.core.warm_up import example_batches, shapes

Shape = tuple[int, ...]


def shape_of(lane: Lane, batch: Batch) -> Shape:
    """Sizes that are padded; 0 for those that are not."""
    sizes = (
        (len(batch.token_ids), lane.token_buckets),
        (len(batch.context_lens), lane.seq_buckets),
        (batch.block_tables[0].shape[1], lane.block_buckets),
        (len(batch.logits_rows), lane.row_buckets),
    )
    return (batch.lane, *(size if buckets else 0 for size, buckets in sizes))


def test_no_step_has_another_shape() -> None:
    seen: Counter[bool] = Counter()
    for number in range(150):
        dice = random.Random(number)
        s = random_lanes(dice, random_scenario(dice))
        r = rig(
            blocks=200, block_size=s.block_size, max_num_seqs=s.max_num_seqs, rows=s.rows,
            max_model_len=s.max_model_len, lanes=s.lanes,
        )  # fmt: skip
        known = {shape_of(s.lanes[b.lane], b) for b in example_batches(s.lanes)}
        for builder in r.runner.builders:
            original = builder.build

            def build(plan, original=original, known=known, lanes=s.lanes):  # type: ignore[no-untyped-def]
                batch = original(plan)
                shape = shape_of(lanes[batch.lane], batch)
                assert shape in known, shape
                seen[any(shape[1:])] += 1
                return batch

            builder.build = build  # type: ignore[method-assign]
        for i, arrival in enumerate(s.arrivals):
            try:
                r.engine.add(scenario_request(i, arrival))
            except RequestRefused:
                continue
        r.run()
    assert min(seen.values()) > 500, seen
    assert len(LANE_SHAPES) >= 6


def test_shapes_that_cannot_come_are_left_out() -> None:
    buckets = (4, 16, 64)
    decode = Lane(
        ("decode",), 64, 64, token_buckets=buckets, seq_buckets=buckets, row_buckets=buckets
    )
    assert list(shapes(decode, False)) == [(n, n, 1, n) for n in buckets]
    assert list(shapes(decode, True)) == [(n, n, 1, r) for n in buckets for r in buckets if r <= n]
    prompts = Lane(("prefill",), 64, 64, token_buckets=(16, 64), seq_buckets=(8, 32))
    assert [s[:2] for s in shapes(prompts, False)] == [(16, 8), (16, 32), (64, 8), (64, 32)]
    few = Lane(("prefill",), 2, 10, token_buckets=(4, 16, 64), seq_buckets=(1, 2, 4))
    assert [s[:2] for s in shapes(few, False)] == [(4, 1), (4, 2), (16, 1), (16, 2)]


def test_they_hold_nothing_but_padding() -> None:
    lanes = (Lane(("prefill",), token_buckets=(8,), block_buckets=(3,)), Lane(("decode",)))
    a, b = example_batches(lanes, groups=2)
    assert (a.num_tokens, a.num_seqs, a.num_rows, a.max_query_len) == (0, 0, 0, 0)
    assert all((s == -1).all() and len(s) == 8 for s in a.slots) and len(a.slots) == 2
    assert all(t.shape == (1, 3) and not t.any() for t in a.block_tables)
    assert not a.query_start.any() and not a.context_lens.any() and len(a.query_start) == 2
    assert (a.lane, a.kind, b.lane, b.kind) == (0, "prefill", 1, "decode")


@pytest.mark.parametrize("size", [1, 5])
def test_a_lane_without_buckets_has_one_shape(size: int) -> None:
    assert len(list(example_batches((Lane(),) * size))) == size
