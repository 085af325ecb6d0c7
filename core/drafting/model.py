"""Drafts by a model: a smaller one of the same vocabulary, or the first layers of the model itself
(Leviathan et al. 2023; Elhoushi et al. 2024 for the latter).

It is driven by a runner of its own over a KV cache of its own, so nothing of the target's is ever written. Of
each of the target's sequences it keeps a *shadow*: what of it stands in its cache. Before it drafts, the shadow
is brought to the target's tokens; what they have in common stays.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from octavo.core.blocks import BlockManager
from octavo.core.drafting.times import StepTimes
from octavo.core.lanes import Room
from octavo.core.params import SamplingParams
from octavo.core.runner import Runner
from octavo.core.sequence import Sequence as Seq
from octavo.core.types import Request, ScheduledTokens, StepPlan

logger = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0)


class _Shadow:
    """Stands in the target's `draft_state`, and ends with it."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: int) -> None:
        self.key = key


class ModelDrafter:
    """Drafts what a model finds most likely, all sequences together.

    Args:
        runner: of the model that drafts; closed with this.
        blocks: of its KV cache. Where they are short, the shadows that were used least recently go.
        lane: what one of its steps may hold; mixed.
        max_len: the longest sequence it can follow, in tokens.
        times: of its own steps.
    """

    alike = True

    def __init__(
        self, runner: Runner, blocks: BlockManager, lane: Room, max_len: int, times: StepTimes
    ) -> None:
        self.runner, self.blocks, self.lane, self.max_len = runner, blocks, lane, max_len
        self.times = times
        self.once_seconds = 0.0  # of the last `propose`, for prompts: they are computed once
        self._shadows: OrderedDict[int, Seq] = OrderedDict()  # the least recently used first
        self._ended: deque[int] = deque()  # filled whenever Python lets a sequence go
        self._keys = itertools.count(1)
        self._steps = 0

    @property
    def num_shadows(self) -> int:
        """Sequences that have something in the KV cache."""
        self._sweep()
        return len(self._shadows)

    def missing(self, sequence: Seq) -> int:
        """Tokens of the sequence that it has to compute before its first guess; none while it keeps up."""
        state = sequence.draft_state
        shadow = self._shadows.get(state.key) if state is not None else None
        lacking = sequence.num_tokens - (shadow.num_computed if shadow is not None else 0)
        return lacking if lacking > 2 else 0

    def propose(self, sequences: Sequence[Seq], counts: Sequence[int]) -> list[list[int]]:
        """At most `counts[i]` tokens for each sequence; none for one that finds no room."""
        self.once_seconds = 0.0
        self._sweep()
        self.blocks.begin_step(self._steps + 1)
        drafts: list[list[int]] = [[] for _ in sequences]
        kept: set[int] = set()
        active: list[tuple[Seq, list[int], int]] = []
        for sequence, count, draft in zip(sequences, counts, drafts, strict=True):
            count = min(count, self.max_len - sequence.num_tokens + 1)
            shadow = self._synced(sequence, count, kept) if count > 0 else None
            if shadow is not None:
                active.append((shadow, draft, count))
        try:
            while active:
                active = self._step(active)
        except Exception:  # the target does as well without
            logger.exception("the drafter's step failed; nothing is drafted in this one")
            for key in list(self._shadows):
                self._forget(key)
            self.runner.recover()
            return [[] for _ in sequences]
        return drafts

    def close(self) -> None:
        """Drops the model and its KV cache."""
        self._shadows.clear()
        self.runner.close()

    # -------------------------------------------------------------------------------- shadows

    def _synced(self, target: Seq, count: int, kept: set[int]) -> Seq | None:
        """The target's shadow with its tokens and blocks for a draft of `count`; None: no room.
        kept: keys of those in this round, which nobody takes blocks from."""
        tokens = target.tokens[: target.num_tokens]
        state = target.draft_state
        shadow = self._shadows.get(state.key) if state is not None else None
        if shadow is None:
            state = target.draft_state = _Shadow(next(self._keys))
            weakref.finalize(state, self._ended.append, state.key).atexit = False
            request = Request(
                id=target.request.id, prompt_token_ids=tokens.tolist(), params=_GREEDY
            )
            shadow = Seq(request, 0, b"", 0, self.max_len + 1)
            self._shadows[state.key] = shadow
        else:
            known = shadow.tokens[: shadow.num_tokens]
            shared = min(len(known), len(tokens))
            differ = np.flatnonzero(known[:shared] != tokens[:shared])
            same = int(differ[0]) if len(differ) else shared
            shadow.num_computed = min(shadow.num_computed, same, len(tokens) - 1)
            shadow.num_tokens = same
            for token in tokens[same:].tolist():
                shadow.append(token)
            shadow.last_token = int(tokens[-1])
        self._shadows.move_to_end(state.key)
        kept.add(state.key)
        need = self.blocks.blocks_for(len(tokens) + count - 1) - shadow.num_blocks
        if need > 0:
            if not self._make_room(need, kept):
                kept.discard(state.key)
                self._forget(state.key)
                return None
            shadow.add_blocks(self.blocks.allocate(need))
            shadow.writable = shadow.num_blocks * self.blocks.block_size
        return shadow

    def _make_room(self, need: int, kept: set[int]) -> bool:
        blocks = self.blocks
        if need > blocks.usable:
            return False
        for key in [key for key in self._shadows if key not in kept]:
            if need <= blocks.num_free + blocks.num_resting:
                break
            self._forget(key)
        if need > blocks.num_free:
            blocks.settle()
        return need <= blocks.num_free

    def _sweep(self) -> None:
        """Frees the blocks of sequences that have ended."""
        while self._ended:
            self._forget(self._ended.popleft())

    def _forget(self, key: int) -> None:
        shadow = self._shadows.pop(key, None)
        if shadow is not None:
            self.blocks.free(shadow.blocks)
            shadow.drop_blocks()

    # ---------------------------------------------------------------------------------- steps

    def _step(self, active: list[tuple[Seq, list[int], int]]) -> list[tuple[Seq, list[int], int]]:
        """One step of the model. Gives those whose draft is not done."""
        lane = self.lane
        room, items = lane.tokens, []
        for shadow, _, _ in active[: min(lane.seqs, lane.rows)]:
            missing = shadow.num_tokens - shadow.num_computed
            count = min(missing, room)
            if count < missing:
                count -= count % lane.chunk_multiple
            if not count:
                break
            room -= count
            items.append(ScheduledTokens(shadow, shadow.num_computed, count, int(count == missing)))
        self._steps += 1
        plan = StepPlan(self._steps, tuple(items), lane=lane.index)
        begun = time.perf_counter()
        tokens = self.runner.execute(plan).tokens.tolist()
        if any(item.count > 2 for item in items):
            self.once_seconds += time.perf_counter() - begun
        drawn = iter(tokens)
        left = []
        for item, entry in zip(items, active, strict=False):
            shadow, draft, count = entry
            shadow.num_computed += item.count
            if item.samples:
                token = next(drawn)
                if token < 0:  # its logits are not finite
                    continue
                draft.append(token)
                if len(draft) == count:
                    continue
                shadow.append(token)
            left.append(entry)
        return left + active[len(items) :]
