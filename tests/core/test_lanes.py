"""Several lanes: whose turn it is, what a batch holds, and which lanes and requests are refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support import Rig, request, rig

from octavo.core.contract import Lane
from octavo.core.lanes import LaneError, LaneSet
from octavo.core.params import RequestRefused
from octavo.core.types import StepPlan


def apart(**changes: Any) -> tuple[Lane, ...]:
    """A lane for prompts and one for decoding; `changes` are those of the first."""
    prompts: dict[str, Any] = {"max_seqs": 2, "max_tokens": 32, "exclusive": True, **changes}
    decode = Lane(("decode",), max_seqs=16, max_tokens=16, exclusive=prompts["exclusive"])
    return Lane(("prefill",), **prompts), decode


def laned(lanes: tuple[Lane, ...], **options: Any) -> Rig:
    seqs = LaneSet(lanes, 64).max_num_seqs
    return rig(**{"max_num_seqs": seqs, "rows": 64, "lanes": lanes, **options})


def watched(r: Rig) -> list[tuple[tuple[int, int], ...]]:
    """Of each step from now on: (lane, items) of its parts."""
    steps: list[tuple[tuple[int, int], ...]] = []

    def note(step: StepPlan) -> None:
        steps.append(tuple((part.lane, len(part.items)) for part in step.parts))

    r.runner.hook = note
    return steps


def test_prompts_and_decoding_take_turns() -> None:
    """Neither starves: with both at work no lane runs twice in a row, whoever came first."""
    r = laned(apart())
    steps = watched(r)
    for i in range(12):
        r.engine.add(request(f"r{i}", 60, max_tokens=30))
    r.run()
    assert steps[0] == ((0, 1),)
    both = steps[2 : max(i for i, step in enumerate(steps) if step[0][0] == 0)]
    assert len(both) > 20
    assert all(a[0][0] != b[0][0] for a, b in itertools.pairwise(both))
    assert all(len(step) == 1 for step in steps)
    assert all(count <= 2 for ((lane, count),) in steps if lane == 0)
    r.check_empty()


def test_one_side_alone_runs_every_step() -> None:
    r = laned(apart())
    steps = watched(r)
    r.engine.add(request("a", 100, max_tokens=5))
    assert r.run() == 4 + 4  # four chunks, of which the last draws; then a token a step
    assert [lane for ((lane, _),) in steps] == [0] * 4 + [1] * 4


def test_lanes_that_are_not_exclusive_share_a_step() -> None:
    r = laned(apart(exclusive=False))
    steps = watched(r)
    r.engine.add(request("a", 8, max_tokens=20))
    r.step()
    r.engine.add(request("b", 64, max_tokens=20))
    r.run()
    assert steps[1:4] == [((0, 1), (1, 1)), ((0, 1), (1, 1)), ((1, 2),)]


def test_a_mixed_lane_beside_one_that_decodes_takes_the_prompts() -> None:
    lanes = (Lane(("mixed",), max_tokens=32), Lane(("decode",), max_seqs=4, max_tokens=4))
    r = laned(lanes)
    steps = watched(r)
    for i in range(4):
        r.engine.add(request(f"r{i}", 20, max_tokens=10))
    r.run()
    assert ((1, 4),) in steps and ((0, 3), (1, 1)) in steps
    assert r.scheduler.limits.max_num_seqs == 4


# ------------------------------------------------------------------------------- prompts whole


def test_a_prompt_is_computed_whole_or_not_begun() -> None:
    r = laned(apart(chunked=False, max_seqs=4))
    sizes: list[list[int]] = []
    r.runner.hook = lambda step: sizes.append([item.count for item in step.items])
    for i, length in enumerate((20, 12, 1, 32, 5)):
        r.engine.add(request(f"r{i}", length, max_tokens=2))
    r.run()
    assert [s for s in sizes if max(s) > 1] == [[20, 12], [1, 5]] or [20, 12] in sizes
    assert [32] in sizes and all(sum(s) <= 32 for s in sizes)


def test_prefixes_are_not_taken_over_by_prompts_that_are_computed_whole() -> None:
    r = laned(apart(chunked=False))
    for name in "ab":
        r.engine.add(request(name, list(range(32)), max_tokens=2))
        r.run()
    stats = r.scheduler.stats()
    assert (stats.prefix_hit_tokens, stats.kv_blocks_cached) == (0, 0)


def test_what_outgrew_the_lane_comes_back_token_by_token() -> None:
    """Preempted at 50 tokens, with a lane of 32: the first 32 at once, the rest as decode items."""
    r = laned(apart(chunked=False), blocks=9, block_size=8)
    r.engine.add(request("first", 20, max_tokens=40, priority=-1))
    r.engine.add(request("later", 20, max_tokens=40))
    counts: list[int] = []
    r.runner.hook = lambda step: counts.extend(
        item.count for item in step.items if item.sequence.request.id == "later"
    )
    r.run()
    assert r.scheduler.stats().preemptions >= 1
    again = counts[counts.index(20) + 1 :]
    assert {c for c in again if c > 1} <= {32, *range(20, 33)} and max(again) >= 21
    r.check_empty()


def test_requests_that_no_batch_could_hold_are_refused_at_the_door() -> None:
    r = laned(apart(chunked=False, row_buckets=(1, 4)))
    with pytest.raises(
        RequestRefused, match="33 tokens; this device computes prompts whole, of at most 32"
    ):
        r.engine.add(request("a", 33))
    with pytest.raises(RequestRefused, match=r"n=5 draws 5 tokens from one prompt, this device 4"):
        r.engine.add(request("b", 3, n=5))
    with pytest.raises(RequestRefused, match=r"9 tokens, n=1\) needs 10 rows of logits .* has 4"):
        r.engine.add(request("c", 9, prompt_logprobs=0))
    r.engine.add(request("d", 3, prompt_logprobs=0, max_tokens=2))
    r.run()
    assert len(r.prompt_logprobs["d"]) == 2


# ----------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("lanes", "words"),
    [
        ((), "at least one lane"),
        ((Lane(kinds=()),), "kinds"),
        ((Lane(kinds=("prompt",)),), "lane 0 has kinds .'prompt',.; they are of prefill, decode, mixed"),  # type: ignore[arg-type]
        ((Lane(("decode",)),), "no lane takes prompts"),
        ((Lane(("prefill",)),), "no lane takes decoding sequences"),
        ((Lane(), Lane()), "lanes 0 and 1 both take prefill items in one step"),
        ((Lane(("prefill",)), Lane(("decode",)), Lane()), "lane 2 would never be used"),
        ((Lane(max_tokens=0),), "max_tokens 0"),
        ((Lane(token_buckets=(8, 4)),), r"token_buckets \(8, 4\), which must rise"),
        ((Lane(row_buckets=(0, 4)),), r"row_buckets \(0, 4\), which must rise from at least 1"),
        ((Lane(max_tokens=8, chunk_multiple=16),), "a multiple of 16 tokens and holds 8"),
        ((Lane(row_buckets=(1,)),), "rows of logits are too few"),
        ((Lane(("prefill",), chunked=False), Lane(exclusive=True)), "all be chunked, or none"),
    ],
)  # fmt: skip
def test_lanes_that_cannot_be_driven(lanes: tuple[Lane, ...], words: str) -> None:
    with pytest.raises(LaneError, match=words):
        LaneSet(lanes, 512)


def test_what_lanes_come_to() -> None:
    made = LaneSet(
        (
            Lane(("prefill",), 4, 256, token_buckets=(64, 128), block_buckets=(4, 16), chunked=False,
                 exclusive=True),
            Lane(("decode",), 64, 64, seq_buckets=(8, 32), block_buckets=(8, 64), exclusive=True),
        ),
        100,
    )  # fmt: skip
    assert (made.max_num_seqs, made.max_tokens, made.longest_whole) == (32, 128, 128)
    assert (made.prompt_rows, made.max_blocks) == (100, 16)
    beside = LaneSet((Lane(("prefill",)), Lane(("decode",), 64, 64)), 100)
    assert (beside.prompt_rows, beside.max_num_seqs, beside.max_blocks) == (36, 64, None)
    with pytest.raises(LaneError, match="64 rows of logits are too few"):
        LaneSet((Lane(("prefill",)), Lane(("decode",), 64, 64)), 64)
    with pytest.raises(LaneError, match=r"8 sequences are to run.* lets 4 decode"):
        laned((Lane(max_seqs=4),), max_num_seqs=8)


def test_no_part_of_a_prompt_is_smaller_than_the_lanes_multiple() -> None:
    """Not even where a neighbour leaves room for fewer tokens: the second prompt waits a step."""
    r = laned(apart(chunk_multiple=16))
    chunks: list[tuple[str, int, int]] = []
    r.runner.hook = lambda step: chunks.extend(
        (item.sequence.request.id, item.start, item.count) for item in step.items if item.count > 1
    )
    r.engine.add(request("a", 25, max_tokens=2))
    r.engine.add(request("b", 40, max_tokens=2))
    r.run()
    assert chunks == [("a", 0, 25), ("b", 0, 32), ("b", 32, 8)]


def test_who_decodes_leaves_room_for_a_part_of_a_prompt_before_others_join() -> None:
    """In a mixed lane short prompts would otherwise fill the batch for ever, ahead of a long one."""
    lane = Lane(max_seqs=8, max_tokens=10, chunk_multiple=8)
    r = laned((lane,))
    r.engine.add(request("d", 1, max_tokens=4))
    r.step()
    r.engine.add(request("long", 80, max_tokens=1))
    done: list[str] = []
    for i in range(300):
        more = {"n": 3, "seed": i, "temperature": 1.0}
        r.engine.add(request(f"s{i}", 1, max_tokens=3 + i % 12, **more))
        done += [u.request_id for u in r.step() if u.finish_reason]
        if "long" in done:
            break
    assert "long" in done and i < 100


def test_prompt_logprobs_need_rows_for_a_part_of_the_prompt() -> None:
    r = laned(apart(chunk_multiple=16, row_buckets=(8,)))
    with pytest.raises(RequestRefused, match=r"n=1.*needs 17 rows of logits.*has 8"):
        r.engine.add(request("a", 40, max_tokens=1, prompt_logprobs=0))
    r.engine.add(request("b", 7, max_tokens=1, prompt_logprobs=0))
    r.run()
