"""Who runs in a step, and how many tokens each.

There are no prefill and decode phases: every sequence tries to bring `num_computed` up to
`num_tokens` within one token budget, running sequences first, then waiting ones in order of
(priority, arrival). Long prompts are so computed in chunks beside decoding neighbours.

Every request finishes, whatever the pool size:
- One that could not hold its last token even alone is refused when it is added.
- A waiting sequence is admitted only with blocks for all its tokens in hand, and nobody overtakes it,
  except while it waits for a prefix that a running one is computing (`waiting.py`), which is bounded.
- When blocks run out, the running sequence that is last in order is preempted (its blocks are freed
  and recomputed later), so the first in order always advances.
- After `MAX_PREEMPTIONS` preemptions a sequence is admitted only with blocks up to its last possible
  token and is no longer chosen to make room: the number of preemptions per sequence is bounded.
- Decoding sequences get their token before a prompt gets its chunk, so no long prompt stalls them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from octavo.core.admission import SchedulerLimits, longest, mixed_seed, stored_tokens
from octavo.core.blocks import BlockHash, BlockManager, extend_hashes, root_hash
from octavo.core.outcome import sequence_update, stop_reason
from octavo.core.roster import Group, Roster
from octavo.core.sequence import Sequence
from octavo.core.stats import SchedulerStats
from octavo.core.types import (
    ParamError,
    Request,
    ScheduledTokens,
    SequenceUpdate,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

MAX_PREEMPTIONS = 3
_MOST_PARKED = 32
"""Waiting sequences that a step may set aside to look behind them: bounds the time it takes."""

AbortTarget = str | tuple[str, int]


class Scheduler:
    """Owns every live sequence and, through `blocks`, the KV cache's block tables."""

    def __init__(self, blocks: BlockManager, limits: SchedulerLimits, seed: int = 0) -> None:
        self.blocks = blocks
        self.limits = limits
        self.roster = Roster(blocks)
        self.running = self.roster.running  # in order of service
        self._waiting = self.roster.waiting
        self._seed = seed
        self._order = 0
        self._no_room: tuple[Sequence, int, int] | None = None  # for whom, and when: see _admit

    # ------------------------------------------------------------------------------ in and out

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestRefused: it could never run here; the message has what it needs and what there is.
            ParamError: its id is in use, or its prompt is empty.
        """
        if request.id in self.roster.groups:
            raise ParamError("request_id", f"request id {request.id!r} is in use")
        max_len = longest(request, self.limits, self.blocks)
        root = root_hash(request.adapter, request.cache_salt, request.image_hashes)
        seed = request.params.seed
        if seed is None:
            seed = mixed_seed(self._seed, self._order)
        sequence = Sequence(request, self._order, root, seed & (2**64 - 1), max_len)
        self._order += 1
        self.roster.add(sequence)

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
        return updates

    def has_unfinished(self) -> bool:
        return bool(self.roster.groups)

    def sequences(self) -> Iterator[Sequence]:
        """All live sequences, waiting ones included."""
        return self.roster.sequences()

    def stats(self) -> SchedulerStats:
        return self.roster.stats()

    def check(self) -> None:
        """Audits blocks and queues.

        Raises:
            BlockAuditError, AssertionError: what does not hold.
        """
        self.roster.check()

    # -------------------------------------------------------------------------------- planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing waits or runs."""
        items: list[ScheduledTokens] = []
        copies: dict[int, int] = {}  # destination -> source
        preempted: list[str] = []
        running = self.running
        budget = self.limits.max_num_batched_tokens
        rows = self.limits.max_logits_rows - self.roster.slots_taken  # each may draw in this step
        decodes = _count_decoding(running)  # still to be planned
        position = 0
        while position < len(running) and budget > 0:
            sequence = running[position]
            start = sequence.num_computed
            decoding = sequence.num_tokens - start == 1
            if decoding and start < sequence.writable:  # most sequences of most steps
                items.append(ScheduledTokens(sequence, start, 1, 1))
                budget -= 1
                decodes -= 1
                position += 1
                continue
            item = self._tokens_for(sequence, budget if decoding else budget - decodes, rows)
            decodes -= decoding
            if item is None:  # no room for its tokens or rows of logits beside the others
                position += 1
                continue
            already = len(preempted)
            kept = self._reserve(sequence, item, position, copies, preempted)
            if len(preempted) > already:  # who is gone claims no part of the budget
                decodes = _count_decoding(running[position + kept :])
            if not kept:
                continue  # it had to go itself: the next one stands at its position
            items.append(item)
            budget -= item.count
            rows -= item.count if item.all_logits else 0
            position += 1
        if not preempted or not items:  # else whoever was preempted would take the blocks back
            self._admit(items, budget, rows)
        if not items:
            return None
        self.roster.steps += 1
        return StepPlan(
            step=self.roster.steps,
            items=tuple(items),
            copies=tuple((source, target) for target, source in copies.items()),
            preempted=tuple(preempted),
        )

    def _tokens_for(self, sequence: Sequence, budget: int, rows: int) -> ScheduledTokens | None:
        start = sequence.num_computed
        count = min(sequence.num_tokens - start, budget)
        all_logits = sequence.wants_prompt_logprobs
        if all_logits:
            count = min(count, rows)
        done = start + count == sequence.num_tokens
        if not done and count > self.limits.chunk_multiple:
            count -= count % self.limits.chunk_multiple
        if count <= 0:
            return None
        samples = sequence.pending_samples if done and sequence.max_len > sequence.num_tokens else 0
        return ScheduledTokens(sequence, start, count, samples, all_logits)

    def _reserve(
        self,
        sequence: Sequence,
        item: ScheduledTokens,
        position: int,
        copies: dict[int, int],
        preempted: list[str],
    ) -> bool:
        """Blocks for the tokens of `item`, preempting from the end of `running`. False when the
        sequence itself had to go."""
        blocks = self.blocks
        first = item.start // blocks.block_size
        while True:
            need = blocks.blocks_for(item.start + item.count) - sequence.num_blocks
            shared = first < sequence.num_blocks and blocks.is_shared(
                int(sequence.block_table[first])
            )
            if max(need, 0) + shared <= blocks.num_free:
                break
            victim = self._victim(position)
            self.roster.preempt(victim)
            preempted.append(victim.request.id)
            if victim is sequence:
                return False
        if shared:
            (target,) = blocks.allocate(1)
            source = int(sequence.block_table[first])
            copies[target] = source
            sequence.replace_block(first, target)
            blocks.free([source])
        if need > 0:
            sequence.add_blocks(blocks.allocate(need))
        if item.count == item.samples == 1 and not item.all_logits:  # it decodes from now on
            sequence.writable = sequence.num_blocks * blocks.block_size
        return True

    def _victim(self, position: int) -> Sequence:
        for sequence in reversed(self.running[position:]):
            if sequence.preemptions < MAX_PREEMPTIONS:
                return sequence
        return self.running[position]  # only after a fork: a parent's last block is shared again

    def _admit(self, items: list[ScheduledTokens], budget: int, rows: int) -> None:
        waiting, slots, parked = self._waiting, self.limits.max_num_seqs, 0
        while budget > 0 and self.roster.slots_taken < slots and (sequence := waiting.first()):
            # Who found no room finds none before something is given back.
            moment = sequence, self.blocks.frees, self.roster.slots_taken
            if self._no_room == moment:
                return
            hits: list[int] = []
            shares = self.blocks.prefix_caching and not sequence.wants_prompt_logprobs
            if shares:
                hits, awaited = self._known_prefix(sequence)
                if awaited is not None:
                    if parked == _MOST_PARKED:
                        return
                    waiting.park(awaited)
                    parked += 1
                    continue
            if self.roster.slots_taken + sequence.pending_samples > slots:
                self._no_room = moment
                return
            rows -= sequence.pending_samples
            if rows < sequence.wants_prompt_logprobs:
                return
            if not self._take_blocks(sequence, hits):
                self._no_room = moment
                return
            item = self._tokens_for(sequence, budget, rows)
            assert item is not None
            self.roster.start(sequence)
            self._no_room = None
            if shares:
                waiting.promise(sequence)
            items.append(item)
            budget -= item.count
            rows -= item.count if item.all_logits else 0

    def _known_prefix(self, sequence: Sequence) -> tuple[list[int], BlockHash | None]:
        """The cached blocks that a waiting sequence begins with, and which block to wait for that a
        running one is computing behind them. The last token is always computed."""
        size = self.blocks.block_size
        extend_hashes(sequence.hashes, sequence.root, sequence.tokens[: sequence.num_tokens], size)
        findable = (sequence.num_tokens - 1) // size
        hits = self.blocks.lookup(sequence.hashes[:findable])
        return hits, self._waiting.awaited(sequence, len(hits), findable)

    def _take_blocks(self, sequence: Sequence, hits: list[int]) -> bool:
        """Prefix hits and new blocks for every known token, and room for the neighbours to grow."""
        blocks, size = self.blocks, self.blocks.block_size
        target = sequence.num_tokens
        spare = 0
        if sequence.preemptions >= MAX_PREEMPTIONS:
            target = stored_tokens(sequence.max_len, sequence.num_prompt)
        elif self.running:
            spare = len(self.running)
        need = blocks.blocks_for(target) - len(hits)
        from_free = blocks.count_free(hits)
        if need + from_free + spare > blocks.num_free:
            return False
        blocks.acquire(hits)
        sequence.num_remembered = len(hits)
        sequence.add_blocks(hits)
        sequence.add_blocks(blocks.allocate(need))
        sequence.num_computed = len(hits) * size
        self._account_hits(sequence)
        return True

    def _account_hits(self, sequence: Sequence) -> None:
        if sequence.preemptions:
            sequence.timings.num_recomputed_tokens += sequence.num_tokens - sequence.num_computed
            return
        sequence.num_cached = sequence.num_computed
        sequence.timings.num_cached_tokens = sequence.num_computed
        self.roster.counts["query"] += sequence.num_tokens
        self.roster.counts["hit"] += sequence.num_computed

    # ------------------------------------------------------------------------------ after a step

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Takes a step's tokens: advances, remembers full blocks, forks samples, finishes, frees."""
        updates: list[SequenceUpdate] = []
        tokens: list[int] = result.tokens.tolist()
        size, remembers = self.blocks.block_size, self.blocks.prefix_caching
        now = time.monotonic()
        row = 0
        for item in plan.items:
            sequence: Sequence = item.sequence
            first = row
            row += item.samples
            if not sequence.running:
                continue  # it ended while the step ran
            sequence.num_computed = item.start + item.count
            if remembers and sequence.num_computed // size > sequence.num_remembered:
                self._remember_full_blocks(sequence)
            if item.samples != 1 or item.all_logits:
                self._take_rows(item, result, tokens[first:row], first, now, updates)
            else:
                logprobs = result.logprobs[first] if result.logprobs else None
                self._take_token(sequence, tokens[first], logprobs, None, now, updates)
        return updates

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
            if sequence.num_computed >= sequence.max_len:  # max_tokens=0: the prompt was all
                updates.extend(
                    self.roster.finish(sequence, [], "length", None, None, prompt_logprobs)
                )
            elif prompt_logprobs is not None:
                index = self.roster.indices(sequence)[0]
                updates.append(
                    sequence_update(sequence, [], prompt_logprobs=prompt_logprobs, index=index)
                )
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


def _count_decoding(sequences: SequenceOf[Sequence]) -> int:
    return sum([s.num_tokens - s.num_computed == 1 for s in sequences])
