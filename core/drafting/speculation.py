"""When to draft, and how much: drafts fill what a step of decoding sequences leaves, where that pays.

A step over n sequences takes t(n); with K tokens of drafts t(n + K), and brings as many tokens more as are
accepted. What steps take is timed at start-up and learned from while the engine runs (times.py), and of each
sequence how often a drafted token was the right one. Drafts are as long as the tokens for each second are
most; where no draft pays none is made, and now and then one is tried all the same.

A drafter that is *alike* to all, a model, is about as often right whatever the text, and each of its tokens takes
time of its own, the first one of a sequence that of computing all its tokens. So it drafts where the answers that
are still to come win that back. One sequence tries it for all, with short drafts, and if it guesses badly it is
tried again ever more rarely: such a model costs next to nothing.
"""

from __future__ import annotations

import time

from octavo.core.blocks import BlockManager
from octavo.core.drafting.drafter import Drafter, as_alike
from octavo.core.drafting.times import StepTimes
from octavo.core.sequence import Sequence
from octavo.core.types import ScheduledTokens, StepPlan

_HOPE = 0.6  # how likely a drafted token is right before anything is known
_SHARE = 0.15  # weight of what was just seen
_SHARE_OF_ALL = (
    0.05  # the same, at least, in what new sequences begin with, of a drafter alike to all
)
_PRIOR = 4  # tokens that _HOPE counts as there, while few have been tried
_TRIALS = 4  # tokens of such a drafter that one sequence tries before all others may
_FORGET = 0.01  # share of the way back to what it began with for each step without a draft
_GAIN = 1.03  # below it is noise
_SHORT = 2  # tokens of its drafts meanwhile
_TO_COME = 256  # tokens that an answer has left at most, as far as it is planned for
_PROBE = 100  # steps in which drafts did not pay, until one is tried
_MOST_PATIENCE = 3200  # the same, when many such trials of a drafter alike to all were in vain


class Speculation:
    """Adds drafts to steps, and learns from what became of them. Requests with penalties or bad words, which
    count all earlier tokens, go without.

    Args:
        drafter: makes the drafts.
        most: tokens of a draft, at most.
        times: what steps take; None: always drafts as much as there is room for.
    """

    def __init__(self, drafter: Drafter, most: int, times: StepTimes | None = None) -> None:
        self.drafter, self.most, self.times = drafter, most, times
        self.enabled = True
        self.drafted = self.accepted = self.drafts = 0  # tokens and drafts, since the start
        # What a sequence begins with, and comes back to while it has no drafts. Copied text is here or there;
        # a model guesses about as well for everybody, so what it was worth to others counts.
        self._hope = _HOPE
        self._alike = as_alike(drafter)
        self._tried = 0  # tokens, of such a drafter
        self._refused = 0
        self._patience = _PROBE
        self._drafting = 0.0  # seconds that the drafts of the step in hand took

    def close(self) -> None:
        """Lets go what the drafter holds."""
        close = getattr(self.drafter, "close", None)
        if close is not None:
            close()

    # ------------------------------------------------------------------------------------ before

    def extend(
        self, items: list[ScheduledTokens], tokens: int, rows: int, blocks: BlockManager, spare: int
    ) -> None:
        """Puts drafts behind the tokens of a step in which sequences decode and nothing else runs.

        Args:
            items: of the step; replaced in place.
            tokens, rows: of the batch, still free.
            spare: free blocks that are left for the sequences to grow.
        """
        self._drafting = 0.0
        if not self.enabled:
            return
        if any(item.count != 1 or item.samples != 1 or item.all_logits for item in items):
            return
        able = [i for i, item in enumerate(items) if item.sequence.may_draft]
        limit = min(self.most, tokens, rows)
        if not able or limit < 1:
            return
        cap, one = self._choose([items[i].sequence for i in able], len(items), limit)
        if cap < 1:
            for i in able:
                sequence = items[i].sequence
                if sequence.draft_hope >= 0:
                    sequence.draft_hope += _FORGET * (self._hope - sequence.draft_hope)
            return
        if one:
            able = [min(able, key=lambda i: self._to_compute(items[i].sequence))]
        room = min(tokens, rows)
        counts = []
        for i in able:
            sequence = items[i].sequence
            counts.append(max(0, min(cap, sequence.max_len - sequence.num_tokens - 1)))
        begun = time.perf_counter()
        drafts = self.drafter.propose([items[i].sequence for i in able], counts)
        self._drafting = time.perf_counter() - begun
        self._learn_drafting(drafts)
        for i, count, draft in zip(able, counts, drafts, strict=True):
            draft = draft[: min(count, room)]
            sequence = items[i].sequence
            draft = draft[: self._make_room(sequence, len(draft), blocks, spare)]
            if not draft:
                continue
            room -= len(draft)
            sequence.set_drafts(draft)
            self.drafts += 1
            self.drafted += len(draft)
            items[i] = ScheduledTokens(
                sequence, items[i].start, 1 + len(draft), 1 + len(draft), drafts=len(draft)
            )

    @staticmethod
    def _make_room(sequence: Sequence, count: int, blocks: BlockManager, spare: int) -> int:
        """Blocks for a draft of `count` tokens, or for as much of it as there are. Nobody is preempted."""
        size = blocks.block_size
        need = blocks.blocks_for(sequence.num_tokens + count) - sequence.num_blocks
        more = min(need, max(0, blocks.num_free - spare))
        if more > 0:
            sequence.add_blocks(blocks.allocate(more))
            sequence.writable = sequence.num_blocks * size
        return min(count, sequence.num_blocks * size - sequence.num_tokens)

    def _choose(self, able: list[Sequence], plain: int, limit: int) -> tuple[int, bool]:
        """The longest draft each sequence is to have, 0 for none; and whether only one is to have it, to see
        what it is worth."""
        if self.times is None:
            return limit, False
        unknown = self._alike is not None and self._tried < _TRIALS
        cap = self._best(self.times, able, plain, limit)
        if cap:
            self._refused, self._patience = 0, _PROBE
            return (min(cap, _SHORT), True) if unknown else (cap, False)
        self._refused += 1
        if self._refused < self._patience:
            return 0, False
        self._refused = 0
        if self._alike is None:
            return max(1, limit // 2), False
        if not self._best(self.times, able, plain, limit, _HOPE):
            return 0, False  # as good as it could be, there is too much to do
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        return min(limit, _SHORT), True

    def _best(
        self, times: StepTimes, able: list[Sequence], plain: int, limit: int, hope: float = 0.0
    ) -> int:
        """The length that brings most, 0 for none. hope: what guesses are worth at least."""
        base = times.of(plain)
        hopes = [max(hope, self._hope_of(sequence)) for sequence in able]
        to_come = sum([min(s.max_len - s.num_tokens, _TO_COME) for s in able]) / len(able)
        each = once = 0.0
        if self._alike is not None:
            drafting = self._alike.times
            each = drafting.of(len(able))
            if missing := sum([self._to_compute(sequence) for sequence in able]):
                once = drafting.of(missing) / max(1.0, to_come)
        least, best = base / _GAIN, 0  # seconds for a token of each
        length = limit
        while length:
            brought = plain + sum([_expected(likely, length) for likely in hopes])
            cost = times.of(plain + length * len(able)) + length * each
            seconds = cost * plain / brought + once
            if seconds < least:
                least, best = seconds, length
            length //= 2
        return best

    def _hope_of(self, sequence: Sequence) -> float:
        """How likely a token drafted for it is right; what it was for others until it has had drafts."""
        return sequence.draft_hope if sequence.draft_hope >= 0 else self._hope

    def _to_compute(self, sequence: Sequence) -> int:
        return self._alike.missing(sequence) if self._alike is not None else 0

    def _learn_drafting(self, drafts: list[list[int]]) -> None:
        """What is computed once, for a prompt, says nothing of the next draft's time."""
        if self._alike is None:
            return
        self._drafting = max(0.0, self._drafting - self._alike.once_seconds)
        length = max(map(len, drafts))
        if length and not self._alike.once_seconds:
            self._alike.times.observe(len(drafts), self._drafting / length)

    # ------------------------------------------------------------------------------------- after

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learns what a step took, if sequences only decoded in it."""
        if self.times is None or not plan.items:
            return
        if any(i.count - i.drafts != 1 or i.samples < 1 for i in plan.items):
            return
        if self._alike is None and any(i.drafts for i in plan.items):
            seconds += self._drafting
        self.times.observe(plan.num_tokens, seconds)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learns what became of a draft."""
        self.accepted += accepted
        sequence.timings.num_drafted_tokens += drafted
        sequence.timings.num_accepted_tokens += accepted
        tried = min(drafted, accepted + 1)
        weight = 1 - (1 - _SHARE) ** tried
        hope = self._hope_of(sequence)
        sequence.draft_hope = hope + weight * (accepted / tried - hope)
        if self._alike is not None:
            self._tried += tried
            share = max(_SHARE_OF_ALL, 1 / (_PRIOR + self._tried))
            self._hope += (1 - (1 - share) ** tried) * (accepted / tried - self._hope)


def _expected(hope: float, length: int) -> float:
    """Tokens accepted of a draft, each of which is right with probability `hope` if those before it are."""
    if hope > 0.999:
        return float(length)
    return hope * (1 - hope**length) / (1 - hope)
