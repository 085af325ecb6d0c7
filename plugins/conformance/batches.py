"""Real batches: pieces of sequences that a backend's own lanes can hold, built by the engine's builder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.core.batch import BatchBuilder
from octavo.core.blocks import root_hash
from octavo.core.params import SamplingParams
from octavo.core.sequence import Sequence as EngineSequence
from octavo.core.types import Batch, Request, ScheduledTokens, StepPlan
from octavo.plugins import ExecutionPlan, Lane
from octavo.plugins.conformance.case import Dice, NotOffered

Style = Literal["mixed", "decode", "prefill", "single", "long"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions [start, start + count) of a sequence whose blocks are these."""

    start: int
    count: int
    blocks: tuple[int, ...]

    @property
    def context(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Step:
    """Pieces of one lane, in the order of the batch."""

    lane: int
    pieces: tuple[Piece, ...]


def room(lane: Lane) -> tuple[int, int]:
    """(sequences, tokens) that a step of this lane may hold."""
    seqs = min([lane.max_seqs, *lane.seq_buckets[-1:]])
    return seqs, min([lane.max_tokens, *lane.token_buckets[-1:]])


def widest(plan: ExecutionPlan) -> int:
    """Blocks of the longest sequence that every lane can hold."""
    return min(
        (lane.block_buckets[-1] for lane in plan.lanes if lane.block_buckets), default=1 << 30
    )


def takes_both(lane: Lane) -> bool:
    """Whether decoding sequences and prompts may stand in one batch of this lane."""
    return "mixed" in lane.kinds or {"prefill", "decode"} <= set(lane.kinds)


def _lane_for(plan: ExecutionPlan, decode: bool) -> int:
    wanted = ("mixed", "decode" if decode else "prefill")
    for i, lane in enumerate(plan.lanes):
        if any(kind in wanted for kind in lane.kinds):
            return i
    raise NotOffered(f"the plan has no lane for {wanted[1]}")


def padded(plan: ExecutionPlan, dynamic: bool, dice: Dice) -> ExecutionPlan:
    """The plan with buckets where it has none: a backend of dynamic shapes takes padding of any size."""
    if not dynamic or any(lane.token_buckets for lane in plan.lanes):
        return plan
    more = int(dice.integers(1, 9))
    lanes = tuple(
        dataclasses.replace(
            lane,
            token_buckets=tuple(range(more, lane.max_tokens + more, more)),
            seq_buckets=tuple(range(3, lane.max_seqs + 3, 3)),
            block_buckets=(7, 19, 80, 600),
        )
        for lane in plan.lanes
    )
    return dataclasses.replace(plan, lanes=lanes)


def draw(dice: Dice, plan: ExecutionPlan, style: Style, pool: Sequence[int], longest: int) -> Step:
    """Pieces of a style over blocks of the pool in random order, no block twice.

    mixed: decoding, continued and new prompts together, as far as the lane holds them. long: one context
    of `longest` and some short ones.
    """
    size = plan.block_size
    # A pool that each of five sequences could fill would make one of many blocks few and short.
    blocks = [int(b) for b in dice.permutation(pool)]
    decode = style in ("decode", "long") or (style == "single" and dice.random() < 0.5)
    number = _lane_for(plan, decode)
    lane = plan.lanes[number]
    mixed = takes_both(lane)
    seqs, tokens = room(lane)
    filler = plan.lanes[_lane_for(plan, False)]
    most_history = room(filler)[1] if not filler.chunked else 1 << 30
    limit = min(longest, widest(plan) * size, len(blocks) * size)
    count = 1 if style == "single" else int(dice.integers(2, min(seqs, 6) + 1)) if seqs > 1 else 1
    pieces: list[Piece] = []
    for i in range(count):
        budget = tokens - (count - 1 - i)  # one token at least for each that follows
        spare = len(blocks) - (count - 1 - i)
        context_limit = min(limit, spare * size)
        if budget < 1 or spare < 1:
            break
        one = decode or (mixed and style == "mixed" and dice.random() < 0.4)
        if style == "long" and i == 0:
            context = context_limit
        else:
            typical = min(context_limit, 5 * size)
            # Sizes around a block's edge are where kernels go wrong.
            edge = [1, size - 1, size, size + 1, 2 * size, int(dice.integers(1, typical + 1))]
            context = min(int(dice.choice(edge)), typical)
        query = 1 if one else int(dice.integers(1, min(context, budget) + 1))
        if not one and style == "prefill" and dice.random() < 0.5:
            query = min(context, budget)
        if not one:
            query = _chunk(lane, context, query, budget)
            context = query if not lane.chunked else context
        context = min(context, most_history + query)
        if one and not mixed and context_limit > 1:
            context = max(context, 2)  # a lane that decodes takes no first token
        if query > budget:
            continue
        need = -(-context // size)
        pieces.append(Piece(context - query, query, tuple(blocks[:need])))
        blocks = blocks[need:]
        tokens -= query
    order = dice.permutation(len(pieces))
    return Step(number, tuple(pieces[i] for i in order))


def _chunk(lane: Lane, context: int, query: int, budget: int) -> int:
    """How many of a prompt's last tokens a step may have: what stands before them was computed in parts
    of the lane's multiple, or nothing was."""
    if not lane.chunked:
        return min(context, budget)
    multiple = lane.chunk_multiple
    start = min(-(-(context - query) // multiple), (context - 1) // multiple) * multiple
    return context - start


def history(plan: ExecutionPlan, pieces: Sequence[Piece]) -> list[tuple[Step, list[int]]]:
    """Steps that bring what stands before each piece, and whose pieces they are: prompts in chunks."""
    number = _lane_for(plan, False)
    lane = plan.lanes[number]
    tokens = room(lane)[1]
    steps = []
    for i, piece in enumerate(pieces):
        at = 0
        while at < piece.start:
            count = min(piece.start - at, tokens)
            if at + count < piece.start and count > lane.chunk_multiple:
                count -= count % lane.chunk_multiple
            steps.append((Step(number, (Piece(at, count, piece.blocks),)), [i]))
            at += count
    return steps


def build(plan: ExecutionPlan, step: Step, samples: int = 1) -> Batch:
    """The batch of a step, by the builder that the engine's runner uses."""
    items = []
    for number, piece in enumerate(step.pieces):
        request = Request(
            id=str(number),
            prompt_token_ids=[number % 7] * piece.context,
            params=SamplingParams(max_tokens=1),
        )
        sequence = EngineSequence(
            request, number, root_hash(None, None, ()), number, piece.context + 1
        )
        sequence.add_blocks(piece.blocks)
        sequence.num_computed = piece.start
        items.append(ScheduledTokens(sequence, piece.start, piece.count, samples))
    lane = plan.lanes[step.lane]
    return BatchBuilder(lane, plan.block_size, index=step.lane).build(
        StepPlan(step=1, items=tuple(items), lane=step.lane)
    )


def rows_of(plan: ExecutionPlan, dice: Dice, most: int = 64) -> int:
    """How many rows [T] a step of the plan may have: a bucket's, or any."""
    lane = plan.lanes[int(dice.integers(len(plan.lanes)))]
    if lane.token_buckets:
        return int(
            dice.choice([b for b in lane.token_buckets if b <= 4 * most] or lane.token_buckets[:1])
        )
    return int(dice.choice([1, 2, 3, 7, 8, 16, 33, most]))


def logits_rows_of(plan: ExecutionPlan, wanted: int) -> int:
    """How many rows of logits [L] a step with `wanted` has: the row bucket's."""
    buckets = plan.lanes[0].row_buckets
    fitting = [b for b in buckets if b >= wanted]
    return int(fitting[0]) if fitting else int(buckets[-1]) if buckets else wanted


def slots_of(batch: Batch) -> np.ndarray:
    """The named slots of a batch, padding left out."""
    slots = batch.slots[0]
    result: np.ndarray = slots[slots >= 0].copy()
    return result
