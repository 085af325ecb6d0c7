"""StepPlan -> Batch: positions, slots, tables, rows and padding against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import request

from octavo.core.batch import BatchBuilder, bucket, prompt_logprob_rows
from octavo.core.blocks import root_hash
from octavo.core.contract import Lane
from octavo.core.sequence import Sequence
from octavo.core.types import Batch, ScheduledTokens, StepPlan, TokenLogprobs

ROOT = root_hash(None, None, ())


def build_batch(plan: StepPlan, lane: Lane, block_size: int, groups: int = 1) -> Batch:
    return BatchBuilder(lane, block_size, groups).build(plan)


def sequence(name: str, prompt: int, blocks: list[int], output: int = 0, **params) -> Sequence:
    made = Sequence(request(name, prompt, **params), 0, ROOT, 0, 10_000)
    for token in range(output):
        made.append(token)
    made.add_blocks(blocks)
    return made


@pytest.mark.parametrize(
    ("size", "buckets", "wanted"), [(5, (), 5), (5, (4, 8), 8), (8, (4, 8), 8), (1, (4, 8), 4)]
)
def test_bucket(size: int, buckets: tuple[int, ...], wanted: int) -> None:
    assert bucket(size, buckets) == wanted


def test_beyond_the_largest_bucket() -> None:
    with pytest.raises(ValueError, match="9 exceeds the lane's largest bucket 8"):
        bucket(9, (4, 8))


def test_a_mixed_step() -> None:
    a = sequence("a", 6, [3, 9], output=1)
    b = sequence("b", 10, [1, 2, 7])
    plan = StepPlan(
        1, (ScheduledTokens(a, 6, 1, 1), ScheduledTokens(b, 3, 4, 0), ScheduledTokens(b, 7, 3, 2))
    )
    batch = build_batch(plan, Lane(), 4)
    assert (batch.num_tokens, batch.num_seqs) == (8, 3)
    assert batch.token_ids.tolist() == [0, *b.tokens[3:10].tolist()]
    assert batch.positions.tolist() == [6, 3, 4, 5, 6, 7, 8, 9]
    assert batch.slots[0].tolist() == [38, 7, 8, 9, 10, 11, 28, 29]
    assert batch.query_start.tolist() == [0, 1, 5, 8]
    assert batch.context_lens.tolist() == [7, 7, 10]
    assert batch.block_tables[0].tolist() == [[3, 9, 0], [1, 2, 7], [1, 2, 7]]
    assert batch.logits_rows.tolist() == [0, 7, 7]
    assert (batch.max_query_len, batch.max_context_len) == (4, 10)


def test_padding_points_at_nothing() -> None:
    a = sequence("a", 3, [5])
    lane = Lane(token_buckets=(8, 16), seq_buckets=(4,), block_buckets=(2, 6))
    batch = build_batch(StepPlan(1, (ScheduledTokens(a, 0, 3, 1),)), lane, 4, groups=2)
    assert batch.token_ids.tolist() == [*a.tokens[:3].tolist(), 0, 0, 0, 0, 0]
    assert batch.slots[0].tolist() == [20, 21, 22, -1, -1, -1, -1, -1]
    assert batch.query_start.tolist() == [0, 3, 3, 3, 3]
    assert batch.context_lens.tolist() == [3, 0, 0, 0]
    assert batch.block_tables[0].shape == (4, 2) and batch.block_tables[0].sum() == 5
    assert len(batch.slots) == len(batch.block_tables) == 2
    assert batch.num_tokens == 3 and batch.num_seqs == 1


@pytest.mark.parametrize(
    ("start", "count", "done", "wanted"),
    [
        (0, 10, 0, range(0, 9)),  # the last prompt token predicts the output, not the prompt
        (0, 4, 0, range(0, 4)),
        (4, 6, 4, range(4, 9)),
        (0, 10, 6, range(6, 9)),  # computed again after a preemption: only what is missing
        (9, 1, 9, range(0)),
    ],
)
def test_prompt_logprob_rows(start: int, count: int, done: int, wanted: range) -> None:
    made = sequence("a", 10, [1, 2, 3], prompt_logprobs=1)
    made.prompt_logprobs = [TokenLogprobs(1, -1.0, 1, [], [])] * done
    assert prompt_logprob_rows(ScheduledTokens(made, start, count, 0, True)) == wanted


def test_rows_to_draw_from_come_before_prompt_rows() -> None:
    a = sequence("a", 4, [1], prompt_logprobs=1)
    b = sequence("b", 2, [2])
    plan = StepPlan(1, (ScheduledTokens(a, 0, 4, 2, True), ScheduledTokens(b, 0, 2, 1)))
    assert build_batch(plan, Lane(), 4).logits_rows.tolist() == [3, 3, 5, 0, 1, 2]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_against_a_plain_loop(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 3, 16]))
    items, wanted = [], []
    for i in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(1, 40))
        start = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - start))
        blocks = data.draw(st.lists(st.integers(1, 500), min_size=-(-length // size), max_size=50))
        made = sequence(str(i), length, blocks)
        items.append(ScheduledTokens(made, start, count, 0))
        for p in range(start, start + count):
            wanted.append((int(made.tokens[p]), p, blocks[p // size] * size + p % size))
    batch = build_batch(StepPlan(1, tuple(items)), Lane(token_buckets=(64, 256)), size)
    got = zip(batch.token_ids, batch.positions, batch.slots[0], strict=True)
    assert [tuple(map(int, row)) for row in got][: len(wanted)] == wanted
    assert (batch.slots[0][len(wanted) :] == -1).all()
    assert batch.query_start[-1] == len(wanted) == batch.num_tokens
    assert all(
        batch.context_lens[i] == item.start + item.count
        and np.array_equal(
            batch.block_tables[0][i, : item.sequence.num_blocks], item.sequence.blocks
        )
        for i, item in enumerate(items)
    )


ARRAYS = ("token_ids", "positions", "query_start", "context_lens", "logits_rows")


def values(batch: Batch) -> dict[str, np.ndarray]:
    found = {name: getattr(batch, name).copy() for name in ARRAYS}
    return {**found, "slots": batch.slots[0].copy(), "tables": batch.block_tables[0].copy()}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_buffers_that_are_used_again_say_what_new_ones_say(data: st.DataObject) -> None:
    """Sequences come, grow, lose their blocks or one of them, change places and go; the batch before
    stays as it was while the next one is built."""
    size = 4
    lane = data.draw(
        st.sampled_from(
            [Lane(), Lane(token_buckets=(16, 400), seq_buckets=(4, 9), block_buckets=(3, 8, 60))]
        )
    )
    builder = BatchBuilder(lane, size)
    free = iter(range(1, 10_000))
    known: list[Sequence] = []
    earlier: tuple[Batch, dict[str, np.ndarray]] | None = None
    for step in range(data.draw(st.integers(2, 12))):
        changes = ["new", "new", "go", "drop", "replace"]
        for change in data.draw(st.lists(st.sampled_from(changes), max_size=4)):
            if change == "new" and len(known) < 9:
                known.append(sequence(f"{step}{len(known)}", data.draw(st.integers(1, 30)), []))
            elif change == "go" and known:
                known.pop(data.draw(st.integers(0, len(known) - 1)))
            elif change == "drop" and known:
                data.draw(st.sampled_from(known)).drop_blocks()
            elif change == "replace" and known:
                some = data.draw(st.sampled_from(known))
                if some.num_blocks:
                    some.replace_block(some.num_blocks - 1, next(free))
        if not known:
            continue
        chosen = data.draw(st.permutations(known))[: data.draw(st.integers(1, len(known)))]
        items = []
        for one in chosen:
            if data.draw(st.booleans()):
                one.append(step)
            missing = -(-one.num_tokens // size) - one.num_blocks
            one.add_blocks([next(free) for _ in range(missing)])
            count = data.draw(st.sampled_from([1, one.num_tokens]))
            items.append(
                ScheduledTokens(
                    one, one.num_tokens - count, count, data.draw(st.sampled_from([1, 1, 0, 2]))
                )
            )
        plan = StepPlan(1, tuple(items))
        batch = builder.build(plan)
        wanted = values(BatchBuilder(lane, size).build(plan))
        got = values(batch)
        assert all(np.array_equal(got[name], wanted[name]) for name in wanted), plan
        if earlier is not None:
            kept = values(earlier[0])
            assert all(np.array_equal(kept[name], earlier[1][name]) for name in kept)
        earlier = batch, got


def test_rows_of_logits_are_padded_with_row_0() -> None:
    a, b = sequence("a", 5, [1, 2]), sequence("b", 3, [3], output=1)
    lane = Lane(("prefill",), row_buckets=(2, 4))
    builder = BatchBuilder(lane, 4, index=3)
    cut = builder.build(StepPlan(1, (ScheduledTokens(a, 0, 4, 0),)))
    assert (cut.num_rows, cut.logits_rows.tolist()) == (0, [0, 0])
    both = builder.build(StepPlan(2, (ScheduledTokens(a, 0, 5, 2), ScheduledTokens(b, 3, 1, 1))))
    assert (both.num_rows, both.logits_rows.tolist()) == (3, [4, 4, 5, 0])
    assert (both.lane, both.kind) == (3, "prefill")


def test_a_mixed_lane_says_what_its_batch_holds() -> None:
    a, b = sequence("a", 5, [1, 2]), sequence("b", 3, [3], output=1)
    prompt, decode = ScheduledTokens(a, 0, 5, 1), ScheduledTokens(b, 3, 1, 1)
    for items, kind in (((prompt,), "prefill"), ((decode,), "decode"), ((prompt, decode), "mixed")):
        assert build_batch(StepPlan(1, items), Lane(), 4).kind == kind
