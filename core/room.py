"""What a step still has room for, and how much of a sequence fits into it."""

from __future__ import annotations

from octavo.core.lanes import Mode, Room
from octavo.core.sequence import Sequence
from octavo.core.types import ScheduledTokens


class Left:
    """What a step's batch of prompts still has room for. Of a mixed lane `tokens` is counted by
    `places` until all that run are planned, and rows for all that may draw are set aside."""

    __slots__ = ("apart", "rows", "seqs", "tokens")

    def __init__(self, mode: Mode, slots_taken: int) -> None:
        lane = mode.prompt
        self.apart = not mode.shared
        self.tokens = self.rows = self.seqs = 0
        if lane is not None:
            self.rows, self.seqs = lane.rows, lane.seqs
            if self.apart:
                self.tokens = lane.tokens
            else:
                self.rows -= slots_taken

    def take(self, item: ScheduledTokens) -> None:
        """Counts a prompt's item, with the rows of all the samples that it is to draw."""
        self.tokens -= item.count
        self.seqs -= self.apart
        self.rows -= item.sequence.pending_samples + (item.count if item.all_logits else 0)


def tokens_for(
    sequence: Sequence, budget: int, rows: int, lane: Room | None
) -> ScheduledTokens | None:
    """What a sequence computes next, of at most `budget` tokens and `rows` rows of logits. None where
    nothing of it fits, or the step has no such lane."""
    if lane is None:  # not in this step
        return None
    start = sequence.num_computed
    count = wanted = sequence.num_tokens - start
    if not lane.chunked:
        count = wanted = min(count, 1 if start else lane.tokens)
    count = min(count, budget)
    all_logits = sequence.wants_prompt_logprobs
    if all_logits:
        count = min(count, rows)
    if count <= 0 or (count < wanted and not lane.chunked):
        return None
    done = start + count == sequence.num_tokens
    if not done and lane.chunked:
        count -= count % lane.chunk_multiple
        if not count:  # too little room for a part that is not the last
            return None
    samples = sequence.pending_samples if done and sequence.max_len > sequence.num_tokens else 0
    if sequence.beams is not None:
        samples = min(samples, 1)
        if sequence.beams.begun and done:  # it draws with its group, not now
            count -= 1
            samples = 0
            if not count:
                return None
    return ScheduledTokens(sequence, start, count, samples, all_logits)
