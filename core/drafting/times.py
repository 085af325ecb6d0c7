"""What a step takes by its number of tokens: timed once at start-up, and learned from while the engine runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from octavo.core.blocks import BlockManager
from octavo.core.lanes import Room
from octavo.core.params import SamplingParams
from octavo.core.sequence import Sequence as Seq
from octavo.core.types import Request, ScheduledTokens, StepPlan

if TYPE_CHECKING:
    from octavo.core.runner import Runner

_SHARE = 0.15  # weight of what was just seen
_ROUNDS = 2  # times that a step of each size is timed; the shorter counts

Curve = Sequence[tuple[int, float]]
"""(tokens, seconds) of some sizes, the smallest first."""


class StepTimes:
    """Seconds of a step of any number of tokens.

    Args:
        curve: what was timed before there were requests. Between its sizes a line is drawn, below the first a
            step takes as long, and beyond the last each token its share. What the engine's own steps took
            counts more: a size that was seen by itself, and the curve as a whole by how much longer they
            took than it says, as their contexts are longer.
    """

    def __init__(self, curve: Curve = ()) -> None:
        self.curve = list(curve)
        self._seen: dict[int, float] = {}  # by size class
        self._drift = 1.0

    def of(self, tokens: int) -> float:
        """Seconds of a step of so many tokens; 0 where nothing was timed or seen."""
        seen = self._seen.get(_size_class(tokens))
        return self._drift * self._timed(tokens) if seen is None else seen

    def observe(self, tokens: int, seconds: float) -> None:
        """Learns from a step. A neighbour's noise only ever lengthens one: it counts at most double."""
        size = _size_class(tokens)
        before = self._seen.get(size)
        if before is None:
            self._seen[size] = seconds
        else:
            self._seen[size] = before + _SHARE * (min(seconds, 2 * before) - before)
        if timed := self._timed(tokens):
            self._drift += _SHARE * (min(seconds / timed, 2 * self._drift) - self._drift)

    def _timed(self, tokens: int) -> float:
        if not self.curve:
            return 0.0
        first, last = self.curve[0], self.curve[-1]
        if tokens <= first[0]:
            return first[1]
        for (below, before), (above, after) in pairwise(self.curve):
            if tokens <= above:
                return before + (after - before) * (tokens - below) / (above - below)
        return last[1] * tokens / last[0]


def time_steps(
    runner: Runner, num_blocks: int, block_size: int, lane: Room, max_len: int, budget: float = 0.3
) -> list[tuple[int, float]]:
    """Times steps of 1, 2, 4, … tokens, each of which is drawn behind as where a draft is checked. What the
    KV cache holds is overwritten: it is called before there are requests.

    Args:
        runner, num_blocks, block_size: of the model, and of its KV cache.
        lane: what a step may hold. max_len: tokens of the longest sequence.
        budget: seconds after which no larger step is begun.
    """
    blocks = BlockManager(num_blocks, block_size, False)
    most = min(max_len, lane.tokens, lane.rows, blocks.usable * block_size)
    params = SamplingParams(temperature=0.0)
    curve: list[tuple[int, float]] = []
    begun, size, step = time.perf_counter(), 1, 0
    while size <= most and (len(curve) < 2 or time.perf_counter() - begun < budget):
        sequence = Seq(Request(id="", prompt_token_ids=[0], params=params), 0, b"", 0, most + 1)
        sequence.set_drafts([0] * (size - 1))
        taken = blocks.allocate(blocks.blocks_for(size))
        sequence.add_blocks(taken)
        item = ScheduledTokens(sequence, 0, size, size, drafts=size - 1)
        seconds = []
        for _ in range(_ROUNDS):
            step += 1
            before = time.perf_counter()
            runner.execute(StepPlan(step, (item,), lane=lane.index))
            seconds.append(time.perf_counter() - before)
        blocks.free(taken)
        curve.append((size, min(seconds)))
        size *= 2
    return curve


def _size_class(tokens: int) -> int:
    """Each number up to 16 by itself, then steps of an eighth."""
    if tokens <= 16:
        return tokens
    shift = tokens.bit_length() - 4
    return tokens >> shift << shift
