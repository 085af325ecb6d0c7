"""Who runs in a step, and how many tokens each.

There are no prefill and decode phases: every sequence tries to bring `num_computed` up to
`num_tokens` within one token budget, running sequences first, then waiting ones in order of
(priority, arrival). Long prompts are so computed in chunks beside decoding neighbours. A backend whose
steps are not of one kind has them in several lanes (`lanes.py`); `planner.py` carries out the rules for
who runs, and `intake.py` those for who is let in.

Every request finishes, whatever the pool size:
- One that could not hold its last token even alone is refused when it is added.
- A waiting sequence is admitted only with blocks for all its tokens in hand, and nobody overtakes it,
  except while it waits for a prefix that a running one is computing (`waiting.py`), which is bounded.
- When blocks run out, the running sequence that is last in order is preempted (its blocks are freed
  and recomputed later, or kept on the host: `swap.py`), so the first in order always advances.
- After `MAX_PREEMPTIONS` preemptions a sequence is admitted only with blocks up to its last possible
  token and is no longer chosen to make room: the number of preemptions per sequence is bounded.
- Decoding sequences get their token before a prompt gets its chunk, so no long prompt stalls them.
- A group of beams is preempted as one, and after as many times goes on before all others only, who can
  be preempted to make room for it (`beams.py`).
- Where prompts and decoding sequences have steps of their own, these alternate while both have work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.core.admission import SchedulerLimits, longest, mixed_seed
from octavo.core.beams import Beam, BeamGroup, advance
from octavo.core.blocks import BlockManager, extend_hashes, root_hash
from octavo.core.drafting.speculation import Speculation
from octavo.core.intake import MAX_PREEMPTIONS
from octavo.core.outcome import sequence_update, stop_reason
from octavo.core.params import ParamError
from octavo.core.planner import Planner
from octavo.core.pooling import finish_pooled
from octavo.core.roster import Group, Roster
from octavo.core.sequence import Sequence
from octavo.core.stats import SchedulerStats
from octavo.core.swap import Swap
from octavo.core.types import (
    Request,
    ScheduledTokens,
    SequenceUpdate,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from octavo.core.beam_text import BeamText

__all__ = ["MAX_PREEMPTIONS", "AbortTarget", "Scheduler"]

AbortTarget = str | tuple[str, int]


class Scheduler:
    """Owns every live sequence and, through `blocks`, the KV cache's block tables."""

    def __init__(
        self,
        blocks: BlockManager,
        limits: SchedulerLimits,
        seed: int = 0,
        speculation: Speculation | None = None,
        swap: Swap | None = None,
    ) -> None:
        self.blocks = blocks
        self.limits = limits
        self.swap = swap
        self.roster = Roster(blocks, swap)
        self.running = self.roster.running  # in order of service
        self._waiting = self.roster.waiting
        self._seed = seed
        self._order = 0
        self.lanes = limits.lane_set()
        self._needs: dict[Sequence, Future[Any]] = {}
        self.speculation = speculation
        self._planner = Planner(self.roster, blocks, limits, self.lanes, speculation)

    # ------------------------------------------------------------------------------ in and out

    def add(
        self,
        request: Request,
        needs: Future[Any] | None = None,
        begin_text: Callable[[], BeamText] | None = None,
    ) -> None:
        """Queues a request. With `needs` it is not run before that is done; it then ends with an error
        if that failed. begin_text: for beams with stop strings.

        Raises:
            RequestRefused: it could never run here; the message has what it needs and what there is.
            ParamError: its id is in use, or its prompt is empty.
        """
        if request.id in self.roster.groups:
            raise ParamError("request_id", f"request id {request.id!r} is in use")
        max_len = longest(request, self.limits, self.lanes, self.blocks)
        root = root_hash(request.adapter, request.cache_salt, request.image_hashes)
        seed = request.params.seed
        if seed is None:
            seed = mixed_seed(self._seed, self._order)
        sequence = Sequence(request, self._order, root, seed & (2**64 - 1), max_len)
        self._order += 1
        if request.params.use_beam_search:
            sequence.beams = BeamGroup(request.params, [Beam(sequence)], begin_text=begin_text)
        self.roster.add(sequence, held=needs is not None)
        if needs is not None:
            self._needs[sequence] = needs

    def release(self) -> list[SequenceUpdate]:
        """Queues the requests whose needs are met. Returns the ends of those whose will never be."""
        updates: list[SequenceUpdate] = []
        for sequence, needs in list(self._needs.items()):
            if not sequence.held:  # it ended
                del self._needs[sequence]
            elif needs.done():
                del self._needs[sequence]
                if (error := needs.exception()) is None:
                    self._waiting.release(sequence)
                else:
                    updates.extend(self.roster.finish(sequence, [], "error", str(error)))
        return updates

    def wait_for_needs(self, seconds: float) -> bool:
        """Waits until a held request can go on, `seconds` at most. False when none is held."""
        if not self._needs:
            return False
        wait(self._needs.values(), seconds, FIRST_COMPLETED)
        return True

    def abort(self, targets: Iterable[AbortTarget]) -> list[SequenceUpdate]:
        """Ends requests (by id), or samples of them that hit a stop string (by (id, index)), at once.

        A whole request ends with finish reason "abort", a sample with "stop". Unknown ones are
        ignored: they may have finished while the abort was on its way.
        """
        updates = []
        for target in targets:
            name, index = (target, None) if isinstance(target, str) else target
            group = self.roster.groups.get(name)
            if group is None:
                continue
            for sequence in list(group.live.values()):
                if sequence.beams is not None:  # its samples are known at its end only
                    if index is None:
                        updates.extend(self.roster.finish(sequence, [], "abort", None))
                    break
                if index is None:
                    updates.extend(self.roster.finish(sequence, [], "abort", None))
                elif sequence.index <= index < sequence.index + sequence.pending_samples:
                    updates.extend(self._abort_sample(group, sequence, index))
        return updates

    def _abort_sample(self, group: Group, sequence: Sequence, index: int) -> list[SequenceUpdate]:
        """Ends one sample with reason "stop". While it shares its sequence with siblings it is only marked."""
        wanted = self.roster.indices(sequence)
        if index not in wanted:
            return []
        if len(wanted) == 1:
            return self.roster.finish(sequence, [], "stop", None)
        group.unwanted.add(index)
        return [sequence_update(sequence, [], reason="stop", index=index)]

    def fail(self, plan: StepPlan, message: str) -> list[SequenceUpdate]:
        """Ends every request of a step that could not be computed; the others are untouched."""
        updates = []
        for item in plan.items:
            if item.sequence.running:
                updates.extend(self.roster.finish(item.sequence, [], "error", message))
        if self.swap is not None and (lost := self.swap.failed(plan)):
            for sequence in list(self.running):
                if sequence.running and not lost.isdisjoint(sequence.blocks):
                    updates.extend(self.roster.finish(sequence, [], "error", message))
        return updates

    def restart(self) -> int:
        """The KV cache holds nothing any more: all that run give up their blocks and are computed again,
        and no prefix is known. Returns how many ran. It does not count as their preemption."""
        lost = list(self.running)
        for sequence in reversed(lost):
            if not sequence.running:  # a beam that went with its group
                continue
            self.roster.suspend(sequence)
        self.blocks.reset_cache()
        if self.swap is not None:
            self.swap.reset()
        return len(lost)

    def has_unfinished(self) -> bool:
        return bool(self.roster.groups)

    def sequences(self) -> Iterator[Sequence]:
        """All live sequences, waiting ones included."""
        return self.roster.sequences()

    def stats(self) -> SchedulerStats:
        stats = self.roster.stats()
        if (speculation := self.speculation) is None:
            return stats
        return msgspec.structs.replace(
            stats,
            drafts=speculation.drafts,
            drafted_tokens=speculation.drafted,
            accepted_tokens=speculation.accepted,
        )

    def check(self) -> None:
        """Audits blocks and queues.

        Raises:
            BlockAuditError, AssertionError: what does not hold.
        """
        self.roster.check()

    # -------------------------------------------------------------------------------- planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing waits or runs."""
        return self._planner.plan()

    # ------------------------------------------------------------------------------ after a step

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Takes a step's tokens: advances, remembers full blocks, forks samples, finishes, frees."""
        updates: list[SequenceUpdate] = []
        for family in self.roster.families.values():
            family.peak.note(family.live.values())
        tokens: list[int] = result.tokens.tolist()
        size, remembers = self.blocks.block_size, self._planner.shares
        now = time.monotonic()
        beams: dict[BeamGroup, dict[Sequence, Any]] = {}
        row = 0
        for item in plan.items:
            sequence: Sequence = item.sequence
            first = row
            row += item.samples
            if not sequence.running:
                continue  # it ended while the step ran
            if item.drafts:
                self._take_drafted(item, result, tokens[first:row], first, now, updates)
                continue
            sequence.num_computed = item.start + item.count
            if remembers and sequence.num_computed // size > sequence.num_remembered:
                self._remember_full_blocks(sequence)
            if sequence.beams is not None and item.samples and not item.all_logits:
                rows = beams.setdefault(sequence.beams, {})
                rows[sequence] = result.candidates.get(first)
            elif item.samples != 1 or item.all_logits:
                self._take_rows(item, result, tokens[first:row], first, now, updates)
            else:
                logprobs = result.logprobs[first] if result.logprobs else None
                self._take_token(sequence, tokens[first], logprobs, None, now, updates)
        for group, rows in beams.items():
            updates.extend(advance(self.roster, group, rows))
        return updates

    def _take_drafted(
        self,
        item: ScheduledTokens,
        result: StepResult,
        tokens: list[int],
        first: int,
        now: float,
        updates: list[SequenceUpdate],
    ) -> None:
        """A token and the drafts behind it: what was drawn counts as long as the drafts in front of it are
        what was drawn there. Of the others only the KV cache's slots remain, to be written again."""
        sequence: Sequence = item.sequence
        guesses = sequence.tokens[sequence.num_tokens :][: item.drafts].tolist()
        right = 0
        while right < item.drafts and tokens[right] == guesses[right]:
            right += 1
        assert self.speculation is not None
        self.speculation.learn(sequence, item.drafts, right)
        sequence.num_computed = item.start + 1 + right
        if (
            self._planner.shares
            and sequence.num_computed // self.blocks.block_size > sequence.num_remembered
        ):
            self._remember_full_blocks(sequence)
        for i in range(right + 1):
            logprobs = result.logprobs[first + i] if result.logprobs else None
            self._take_token(sequence, tokens[i], logprobs, None, now, updates)
            if not sequence.running:
                break

    def _take_rows(
        self,
        item: ScheduledTokens,
        result: StepResult,
        tokens: list[int],
        first: int,
        now: float,
        updates: list[SequenceUpdate],
    ) -> None:
        """An item that is not one token drawn from one row: part of a prompt, all of it with one
        token for each sample (rows from `first` on), or prompt log-probabilities."""
        sequence: Sequence = item.sequence
        prompt_logprobs = self._take_prompt_logprobs(item, result)
        if prompt_logprobs and any(math.isnan(entry.logprob) for entry in prompt_logprobs):
            message = "the logits of the prompt were not finite"
            updates.extend(self.roster.finish(sequence, [], "error", message))
            return
        if not item.samples:
            if sequence.num_computed >= sequence.max_len and sequence.request.pooling is not None:
                updates.extend(finish_pooled(self.roster, sequence, result.pooled))
            elif sequence.num_computed >= sequence.max_len:  # max_tokens=0: the prompt was all
                updates.extend(
                    self.roster.finish(sequence, [], "length", None, None, prompt_logprobs)
                )
            elif prompt_logprobs is not None and sequence.beams is None:
                index = self.roster.indices(sequence)[0]
                updates.append(
                    sequence_update(sequence, [], prompt_logprobs=prompt_logprobs, index=index)
                )
            return
        if sequence.beams is not None:  # the prompt's own: the log-probabilities come at the end
            row = {sequence: result.candidates.get(first)}
            updates.extend(advance(self.roster, sequence.beams, row))
            return
        family = self.roster.fork(sequence, item.samples)
        for i, (token, member) in enumerate(zip(tokens, family, strict=True), start=first):
            if member is None:
                continue
            logprobs = result.logprobs[i] if result.logprobs else None
            self._take_token(member, token, logprobs, prompt_logprobs, now, updates)
            prompt_logprobs = None

    def _take_token(
        self,
        sequence: Sequence,
        token: int,
        logprobs: TokenLogprobs | None,
        prompt_logprobs: list[TokenLogprobs] | None,
        now: float,
        updates: list[SequenceUpdate],
    ) -> None:
        if token < 0:
            message = "no token could be sampled: all were excluded, or the logits were not finite"
            updates.extend(
                self.roster.finish(sequence, [], "error", message, None, prompt_logprobs)
            )
            return
        sequence.append(token)
        self.roster.counts["output"] += 1
        timings = sequence.timings
        timings.last_token = now
        first = not timings.first_token
        if first:
            timings.first_token = now
        entries = [logprobs] if logprobs is not None else None
        if token in sequence.ends or sequence.num_tokens >= sequence.max_len:
            reason, stop = stop_reason(sequence, token)
            if reason is not None:
                updates.extend(
                    self.roster.finish(sequence, [token], reason, stop, entries, prompt_logprobs)
                )
                return
        if first or sequence.preemptions != sequence.preemptions_told or prompt_logprobs:
            sequence.preemptions_told = sequence.preemptions
            updates.append(sequence_update(sequence, [token], entries, prompt_logprobs, timings))
            return
        updates.append(
            SequenceUpdate(
                request_id=sequence.request.id,
                index=sequence.index,
                token_ids=[token],
                logprobs=entries,
                num_cached_tokens=sequence.num_cached,
            )
        )

    def _remember_full_blocks(self, sequence: Sequence) -> None:
        size = self.blocks.block_size
        full = sequence.num_computed // size
        extend_hashes(sequence.hashes, sequence.root, sequence.tokens[: full * size], size)
        known = sequence.num_remembered
        sequence.num_remembered = full
        table: list[int] = sequence.block_table[known:full].tolist()
        for block, key in zip(table, sequence.hashes[known:full], strict=True):
            self.blocks.remember(block, key)
            self._waiting.keep(sequence, key)

    def _take_prompt_logprobs(
        self, item: ScheduledTokens, result: StepResult
    ) -> list[TokenLogprobs] | None:
        """Collects what this step computed; the whole list once the prompt is done."""
        if not item.all_logits:
            return None
        sequence: Sequence = item.sequence
        if sequence.prompt_logprobs is None:
            sequence.prompt_logprobs = []
        sequence.prompt_logprobs.extend(result.prompt_logprobs.get(sequence.request.id, ()))
        return None if sequence.wants_prompt_logprobs else sequence.prompt_logprobs
