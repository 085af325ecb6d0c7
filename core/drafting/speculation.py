"""When to draft, and how much: drafts fill what a step of decoding sequences leaves, where that pays.

A step over n sequences takes t(n); with K tokens of drafts t(n + K), and brings as many tokens more as are
accepted. Both are measured while the engine runs: the time of a step by its number of tokens, and of each
sequence how often a drafted token was the right one. Drafts are as long as the tokens for each second are
most; where no draft pays none is made, and now and then one is tried all the same.

A drafter that is *alike* to all, a model, is about as often right whatever the text, and each of its tokens takes
a share of a step. So one sequence tries it for all, with short drafts, and where they do not pay it is tried again
ever more rarely: a model that guesses badly costs next to nothing. A first draft for a sequence has the model
compute all its tokens, so what a step with drafts would take is estimated before it is tried.
"""

from __future__ import annotations

import time

from octavo.core.blocks import BlockManager
from octavo.core.drafting.drafter import Drafter
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
_FLAT = 8  # tokens up to which a step takes about as long as for one: reading the weights binds
_PROBE = 100  # steps in which drafts did not pay, until one is tried
_MOST_PATIENCE = 3200  # the same, when many such trials of a drafter alike to all were in vain


class Speculation:
    """Adds drafts to steps, and learns from what became of them. Requests with penalties or bad words, which
    count all earlier tokens, go without.

    Args:
        drafter: makes the drafts.
        most: tokens of a draft, at most.
        adaptive: False: always drafts as much as there is room for.
    """

    def __init__(self, drafter: Drafter, most: int, adaptive: bool = True) -> None:
        self.drafter, self.most, self.adaptive = drafter, most, adaptive
        self.enabled = True
        self.drafted = self.accepted = self.drafts = 0  # tokens and drafts, since the start
        # What a sequence begins with, and comes back to while it has no drafts. Copied text is here or there;
        # a model guesses about as well for everybody, so what it was worth to others counts.
        self._hope = _HOPE
        self._alike: bool = getattr(drafter, "alike", False)
        self._seconds: dict[int, float] = {}  # of a step, by size class of its number of tokens
        self._refused = 0
        self._patience = _PROBE
        # Of a drafter alike to all: tokens tried, and what one takes, as share of a step without drafts.
        self._tried = 0
        self._token_share: float | None = None
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
        for i in able:
            if items[i].sequence.draft_hope < 0:
                items[i].sequence.draft_hope = self._hope
        due = self._refused + 1 >= self._patience and self._hope < _HOPE
        if self.adaptive and self._alike and (self._tried < _TRIALS or due):
            able = [self._who_tries(items, able)]
            limit = min(limit, _SHORT)
        cap = self._cap([items[i].sequence for i in able], len(items), limit)
        if cap < 1:
            for i in able:
                sequence = items[i].sequence
                sequence.draft_hope += _FORGET * (self._hope - sequence.draft_hope)
            return
        room = min(tokens, rows)
        counts = []
        for i in able:
            sequence = items[i].sequence
            counts.append(max(0, min(cap, sequence.max_len - sequence.num_tokens - 1)))
        begun = time.perf_counter()
        drafts = self.drafter.propose([items[i].sequence for i in able], counts)
        # What is done once for a prompt says nothing of the next draft's time.
        once: float = getattr(self.drafter, "once_seconds", 0.0)
        self._drafting = max(0.0, time.perf_counter() - begun - once)
        self._learn_share(len(items), max(map(len, drafts)))
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

    def _cap(self, able: list[Sequence], plain: int, limit: int) -> int:
        """The longest draft each sequence is to have; 0: none."""
        if not self.adaptive:
            return limit
        base = self._time(plain)
        if base is None:
            return 0  # what a step costs without drafts has to be known first
        cap, tries = self._pays(able, plain, base, limit)
        if tries:
            return cap
        self._refused = 0 if cap else self._refused + 1
        if cap:
            self._patience = _PROBE
        if self._refused < self._patience:
            return cap
        self._refused = 0
        if not self._alike:
            return max(1, limit // 2)
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        return 1

    def _pays(self, able: list[Sequence], plain: int, base: float, limit: int) -> tuple[int, bool]:
        """The length that brings most, 0 for none, and whether that is yet to be seen."""
        best, cap = plain / base * _GAIN, 0
        length = limit
        while length:
            size = plain + length * len(able)
            brought = plain + sum(_expected(s.draft_hope, length) for s in able)
            cost = self._time(size)
            if cost is None:
                likely = max(size, _FLAT) / max(plain, _FLAT) + length * (self._token_share or 0.0)
                if not self._alike or brought / (base * likely) > best:
                    return length, True  # never tried
            elif brought / cost > best:
                best, cap = brought / cost, length
            length //= 2
        return cap, False

    @staticmethod
    def _who_tries(items: list[ScheduledTokens], able: list[int]) -> int:
        """One that the drafter knows, or else the shortest: its tokens have to be computed first."""
        return min(
            able,
            key=lambda i: (items[i].sequence.draft_state is None, items[i].sequence.num_tokens),
        )

    def _learn_share(self, plain: int, length: int) -> None:
        base = self._time(plain)
        if not self._alike or not length or base is None:
            return
        share = self._drafting / length / base
        before = self._token_share
        self._token_share = share if before is None else before + _SHARE * (share - before)

    # ------------------------------------------------------------------------------------- after

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learns what a step took, with its drafts, if sequences only decoded in it."""
        if not plan.items or any(i.count - i.drafts != 1 or i.samples < 1 for i in plan.items):
            return
        if any(i.drafts for i in plan.items):
            seconds += self._drafting
        size = _size_class(plan.num_tokens)
        before = self._seconds.get(size)
        if before is None:
            self._seconds[size] = seconds
        else:  # a neighbour's noise only ever lengthens a step: it counts at most double
            self._seconds[size] = before + _SHARE * (min(seconds, 2 * before) - before)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learns what became of a draft."""
        self.accepted += accepted
        sequence.timings.num_drafted_tokens += drafted
        sequence.timings.num_accepted_tokens += accepted
        tried = min(drafted, accepted + 1)
        weight = 1 - (1 - _SHARE) ** tried
        sequence.draft_hope += weight * (accepted / tried - sequence.draft_hope)
        if self._alike:
            self._tried += tried
            share = max(_SHARE_OF_ALL, 1 / (_PRIOR + self._tried))
            self._hope += (1 - (1 - share) ** tried) * (accepted / tried - self._hope)

    def _time(self, tokens: int) -> float | None:
        return self._seconds.get(_size_class(tokens))


def _expected(hope: float, length: int) -> float:
    """Tokens accepted of a draft, each of which is right with probability `hope` if those before it are."""
    if hope > 0.999:
        return float(length)
    return hope * (1 - hope**length) / (1 - hope)


def _size_class(tokens: int) -> int:
    """Each number up to 16 by itself, then steps of an eighth."""
    if tokens <= 16:
        return tokens
    shift = tokens.bit_length() - 4
    return tokens >> shift << shift
