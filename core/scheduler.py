"""Who runs in a step, and how many tokens each.

There are no prefill and decode phases: every sequence tries to bring `num_computed` up to
`num_tokens` within one token budget, running sequences first, then waiting ones in order of
(priority, arrival). Long prompts are so computed in chunks beside decoding neighbours.

Every request finishes, whatever the pool size:
- One that could not hold its last token even alone is refused when it is added.
- A waiting sequence is admitted only with blocks for all its tokens in hand, and nobody overtakes it.
- When blocks run out, the running sequence that is last in order is preempted (its blocks are freed
  and recomputed later), so the first in order always advances.
- After `MAX_PREEMPTIONS` preemptions a sequence is admitted only with blocks up to its last possible
  token and is no longer chosen to make room: the number of preemptions per sequence is bounded.
- Decoding sequences get their token before a prompt gets its chunk, so no long prompt stalls them.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from octavo.core.admission import SchedulerLimits, longest, mixed_seed, stored_tokens
from octavo.core.blocks import BlockManager, extend_hashes, root_hash
from octavo.core.sequence import Sequence
from octavo.core.stats import SchedulerStats
from octavo.core.types import (
    FinishReason,
    ParamError,
    Request,
    ScheduledTokens,
    SequenceUpdate,
    StepPlan,
    StepResult,
    Timings,
    TokenLogprobs,
)

MAX_PREEMPTIONS = 3

AbortTarget = str | tuple[str, int]


@dataclass(slots=True)
class _Group:
    """A request's live samples, and those that were aborted before they were forked."""

    request: Request
    live: dict[int, Sequence] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)


class Scheduler:
    """Owns every live sequence and, through `blocks`, the KV cache's block tables."""

    def __init__(self, blocks: BlockManager, limits: SchedulerLimits, seed: int = 0) -> None:
        self.blocks = blocks
        self.limits = limits
        self.running: list[Sequence] = []  # in order of service
        self._seed = seed
        # A heap by order of service; entries of sequences that have ended are skipped.
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []
        self._num_waiting = 0
        self._groups: dict[str, _Group] = {}
        self._order = 0
        self._step = 0
        self._slots_taken = 0  # sequences running, forks to come included
        self._counts = dict.fromkeys(
            ("requests", "preemptions", "prompt", "output", "query", "hit"), 0
        )
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}

    # ------------------------------------------------------------------------------ in and out

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestRefused: it could never run here; the message has what it needs and what there is.
            ParamError: its id is in use, or its prompt is empty.
        """
        if request.id in self._groups:
            raise ParamError("request_id", f"request id {request.id!r} is in use")
        max_len = longest(request, self.limits, self.blocks)
        params, prompt = request.params, len(request.prompt_token_ids)
        root = root_hash(request.adapter, request.cache_salt, request.image_hashes)
        seed = params.seed if params.seed is not None else mixed_seed(self._seed, self._order)
        sequence = Sequence(request, self._order, root, seed & (2**64 - 1), max_len)
        self._order += 1
        self._counts["requests"] += 1
        self._counts["prompt"] += prompt
        self._groups[request.id] = _Group(request, {0: sequence})
        self._push_waiting(sequence)

    def abort(self, targets: Iterable[AbortTarget]) -> list[SequenceUpdate]:
        """Ends requests (by id), or samples of them that hit a stop string (by (id, index)), at once.

        A whole request ends with finish reason "abort", a sample with "stop". Unknown ones are
        ignored: they may have finished while the abort was on its way.
        """
        updates = []
        for target in targets:
            name, index = (target, None) if isinstance(target, str) else target
            group = self._groups.get(name)
            if group is None:
                continue
            for sequence in list(group.live.values()):
                if index is None:
                    updates.extend(self._finish(sequence, [], "abort", None))
                elif sequence.index <= index < sequence.index + sequence.pending_samples:
                    updates.extend(self._abort_sample(group, sequence, index))
        return updates

    def _indices(self, sequence: Sequence) -> list[int]:
        """The samples a sequence stands for: its own, or before the fork all that are wanted."""
        if sequence.pending_samples == 1:
            return [sequence.index]
        unwanted = self._groups[sequence.request.id].unwanted
        return [i for i in range(sequence.pending_samples) if i not in unwanted]

    def _abort_sample(self, group: _Group, sequence: Sequence, index: int) -> list[SequenceUpdate]:
        """Ends one sample with reason "stop". While it shares its sequence with siblings it is only marked."""
        wanted = self._indices(sequence)
        if index not in wanted:
            return []
        if len(wanted) == 1:
            return self._finish(sequence, [], "stop", None)
        group.unwanted.add(index)
        return [_update(sequence, [], reason="stop", index=index)]

    def fail(self, plan: StepPlan, message: str) -> list[SequenceUpdate]:
        """Ends every request of a step that could not be computed; the others are untouched."""
        updates = []
        for item in plan.items:
            if item.sequence.index in self._live(item.sequence):
                updates.extend(self._finish(item.sequence, [], "error", message))
        return updates

    def _live(self, sequence: Sequence) -> dict[int, Sequence]:
        group = self._groups.get(sequence.request.id)
        return group.live if group is not None else {}

    def has_unfinished(self) -> bool:
        return bool(self._groups)

    def sequences(self) -> Iterator[Sequence]:
        """All live sequences, waiting ones included."""
        for group in self._groups.values():
            yield from group.live.values()

    # -------------------------------------------------------------------------------- planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing waits or runs."""
        items: list[ScheduledTokens] = []
        copies: dict[int, int] = {}  # destination -> source
        preempted: list[str] = []
        budget = self.limits.max_num_batched_tokens
        rows = self.limits.max_logits_rows - self._slots_taken  # each may draw in this step
        decodes = sum(s.decoding for s in self.running)  # still to be planned
        position = 0
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            decoding = sequence.decoding
            item = self._tokens_for(sequence, budget if decoding else budget - decodes, rows)
            decodes -= decoding
            if item is None:  # no room for its tokens or rows of logits beside the others
                position += 1
                continue
            already = len(preempted)
            kept = self._reserve(sequence, item, position, copies, preempted)
            if len(preempted) > already:  # who is gone claims no part of the budget
                decodes = sum(s.decoding for s in self.running[position + kept :])
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
        self._step += 1
        return StepPlan(
            step=self._step,
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
            self._preempt(victim)
            preempted.append(victim.request.id)
            if victim is sequence:
                return False
        if shared:
            (target,) = blocks.allocate(1)
            source = int(sequence.block_table[first])
            copies[target] = source
            sequence.block_table[first] = target
            blocks.free([source])
        if need > 0:
            sequence.add_blocks(blocks.allocate(need))
        return True

    def _victim(self, position: int) -> Sequence:
        for sequence in reversed(self.running[position:]):
            if sequence.preemptions < MAX_PREEMPTIONS:
                return sequence
        return self.running[position]  # only after a fork: a parent's last block is shared again

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence that has no part in this step's plan yet, and so no copy in it, back to
        the queue."""
        self._release(sequence)
        sequence.num_computed = 0
        sequence.preemptions += 1
        sequence.timings.num_preemptions += 1
        self._counts["preemptions"] += 1
        self._push_waiting(sequence)

    def _admit(self, items: list[ScheduledTokens], budget: int, rows: int) -> None:
        while budget > 0 and (sequence := self._peek_waiting()) is not None:
            if self._slots_taken + sequence.pending_samples > self.limits.max_num_seqs:
                return
            rows -= sequence.pending_samples
            if rows < sequence.wants_prompt_logprobs:
                return
            if not self._take_blocks(sequence):
                return
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            item = self._tokens_for(sequence, budget, rows)
            assert item is not None
            self._start(sequence)
            items.append(item)
            budget -= item.count
            rows -= item.count if item.all_logits else 0

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Prefix hits and new blocks for every known token, and room for the neighbours to grow."""
        blocks, size = self.blocks, self.blocks.block_size
        hits: list[int] = []
        if blocks.prefix_caching and not sequence.wants_prompt_logprobs:
            extend_hashes(
                sequence.hashes, sequence.root, sequence.tokens[: sequence.num_tokens], size
            )
            hits = blocks.lookup(sequence.hashes[: (sequence.num_tokens - 1) // size])
        target = sequence.num_tokens
        spare = 0
        if sequence.preemptions >= MAX_PREEMPTIONS:
            target = stored_tokens(sequence.max_len, sequence.num_prompt)
        elif self.running:
            spare = len(self.running)
        need = blocks.blocks_for(target) - len(hits)
        from_free = sum(blocks.is_free(block) for block in hits)
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
        self._counts["query"] += sequence.num_tokens
        self._counts["hit"] += sequence.num_computed

    def _start(self, sequence: Sequence) -> None:
        sequence.running = True
        self._slots_taken += sequence.pending_samples
        if not sequence.timings.scheduled:
            sequence.timings.scheduled = time.monotonic()
        self._insert_running(sequence)

    def _insert_running(self, sequence: Sequence) -> None:
        index = len(self.running)
        while index and self.running[index - 1].key > sequence.key:
            index -= 1
        self.running.insert(index, sequence)

    # ------------------------------------------------------------------------------ after a step

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Takes a step's tokens: advances, remembers full blocks, forks samples, finishes, frees."""
        updates: list[SequenceUpdate] = []
        row = 0
        for item in plan.items:
            sequence: Sequence = item.sequence
            samples = range(row, row + item.samples)
            row += item.samples
            if self._live(sequence).get(sequence.index) is not sequence:
                continue
            sequence.num_computed = item.start + item.count
            self._remember_full_blocks(sequence)
            prompt_logprobs = self._take_prompt_logprobs(item, result)
            if prompt_logprobs and any(math.isnan(entry.logprob) for entry in prompt_logprobs):
                message = "the logits of the prompt were not finite"
                updates.extend(self._finish(sequence, [], "error", message))
                continue
            if not item.samples:
                if sequence.num_computed >= sequence.max_len:  # max_tokens=0: the prompt was all
                    updates.extend(
                        self._finish(sequence, [], "length", None, None, prompt_logprobs)
                    )
                elif prompt_logprobs is not None:
                    index = self._indices(sequence)[0]
                    updates.append(
                        _update(sequence, [], prompt_logprobs=prompt_logprobs, index=index)
                    )
                continue
            family = self._fork(sequence, item.samples)
            for sample, member in zip(samples, family, strict=True):
                if member is None:
                    continue
                logprobs = result.logprobs[sample] if len(result.logprobs) else None
                updates.extend(
                    self._take_token(member, int(result.tokens[sample]), logprobs, prompt_logprobs)
                )
                prompt_logprobs = None
        return updates

    def _fork(self, sequence: Sequence, samples: int) -> list[Sequence | None]:
        """The sequence and its siblings, with None for those nobody wants any more."""
        family: list[Sequence | None] = [sequence]
        group = self._groups[sequence.request.id]
        for index in range(1, samples):
            if index in group.unwanted:
                family.append(None)
                continue
            child = sequence.fork(index, self.blocks.blocks_for(sequence.num_computed))
            self.blocks.acquire(child.blocks)
            group.live[index] = child
            self._insert_running(child)
            family.append(child)
        sequence.pending_samples = 1
        if samples > 1:
            self._slots_taken -= len(group.unwanted)
            if 0 in group.unwanted:
                self._slots_taken += 1  # which _release gives back
                self._release(sequence)
                del group.live[0]
                family[0] = None
            group.unwanted.clear()
        return family

    def _take_token(
        self,
        sequence: Sequence,
        token: int,
        logprobs: TokenLogprobs | None,
        prompt_logprobs: list[TokenLogprobs] | None,
    ) -> list[SequenceUpdate]:
        if token < 0:
            message = "no token could be sampled: all were excluded, or the logits were not finite"
            return self._finish(sequence, [], "error", message, None, prompt_logprobs)
        sequence.append(token)
        self._counts["output"] += 1
        timings = sequence.timings
        timings.last_token = time.monotonic()
        first = not timings.first_token
        if first:
            timings.first_token = timings.last_token
        news = first or sequence.preemptions != sequence.preemptions_told
        sequence.preemptions_told = sequence.preemptions
        reason, stop = stop_reason(sequence, token)
        entries = [logprobs] if logprobs is not None else None
        if reason is not None:
            return self._finish(sequence, [token], reason, stop, entries, prompt_logprobs)
        return [_update(sequence, [token], entries, prompt_logprobs, timings if news else None)]

    def _remember_full_blocks(self, sequence: Sequence) -> None:
        blocks, size = self.blocks, self.blocks.block_size
        full = sequence.num_computed // size
        if not blocks.prefix_caching or full <= sequence.num_remembered:
            return
        extend_hashes(sequence.hashes, sequence.root, sequence.tokens[: full * size], size)
        for i in range(sequence.num_remembered, full):
            blocks.remember(int(sequence.block_table[i]), sequence.hashes[i])
        sequence.num_remembered = max(full, sequence.num_remembered)

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

    def _finish(
        self,
        sequence: Sequence,
        tokens: list[int],
        reason: FinishReason,
        stop: int | str | None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> list[SequenceUpdate]:
        group = self._groups[sequence.request.id]
        sequence.timings.finished = time.monotonic()
        indices = self._indices(sequence)  # samples that were never forked end with it
        if sequence.running:
            self._release(sequence)
        else:
            self._num_waiting -= 1
        del group.live[sequence.index]
        if not group.live:
            del self._groups[sequence.request.id]
            self._finished[reason] += 1
        timings = sequence.timings
        first = _update(
            sequence, tokens, logprobs, prompt_logprobs, timings, reason, stop, indices[0]
        )
        siblings = [
            msgspec.structs.replace(first, index=i, prompt_logprobs=None) for i in indices[1:]
        ]
        return [first, *siblings]

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots_taken -= sequence.pending_samples
        sequence.running = False
        self.blocks.free(sequence.blocks)
        sequence.num_blocks = 0

    def _push_waiting(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.key, sequence))
        self._num_waiting += 1

    def _peek_waiting(self) -> Sequence | None:
        while self._waiting:
            sequence = self._waiting[0][1]
            if not sequence.running and self._live(sequence).get(sequence.index) is sequence:
                return sequence
            heapq.heappop(self._waiting)
        return None

    # ------------------------------------------------------------------------------ looking in

    def stats(self) -> SchedulerStats:
        # Asked between two steps, so no walk over all blocks: only those not yet full are looked at.
        size = self.blocks.block_size
        allocated = self.blocks.num_used * size
        empty: dict[int, int] = {}
        for sequence in self.running:
            for i in range(sequence.num_computed // size, sequence.num_blocks):
                block = int(sequence.block_table[i])
                room = size - max(0, sequence.num_computed - i * size)
                empty[block] = min(empty.get(block, size), room)
        wasted = sum(empty.values())
        counts = self._counts
        return SchedulerStats(
            running=len(self.running),
            waiting=self._num_waiting,
            kv_blocks_total=self.blocks.usable,
            kv_blocks_used=self.blocks.num_used,
            kv_blocks_cached=self.blocks.num_cached,
            kv_slots_allocated=allocated,
            kv_slots_used=allocated - wasted,
            kv_slots_wasted=wasted,
            steps=self._step,
            requests=counts["requests"],
            preemptions=counts["preemptions"],
            evictions=self.blocks.evictions,
            prompt_tokens=counts["prompt"],
            output_tokens=counts["output"],
            prefix_query_tokens=counts["query"],
            prefix_hit_tokens=counts["hit"],
            finished=dict(self._finished),
        )

    def check(self) -> None:
        """Audits blocks and queues.

        Raises:
            BlockAuditError, AssertionError: what does not hold.
        """
        live = list(self.sequences())
        self.blocks.check([s.blocks for s in live])
        assert {id(s) for s in self.running} == {id(s) for s in live if s.running}, (
            "running list is stale"
        )
        assert [s.key for s in self.running] == sorted(s.key for s in self.running), (
            "running is out of order"
        )
        waiting = sum(not s.running for s in live)
        assert waiting == self._num_waiting, f"{waiting} wait, {self._num_waiting} counted"
        taken = sum(s.pending_samples for s in self.running)
        assert taken == self._slots_taken, f"{taken} slots are taken, {self._slots_taken} counted"


def stop_reason(sequence: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
    """Whether the token just appended ends the sequence, and by which stop token."""
    request, params = sequence.request, sequence.request.params
    if sequence.num_output >= params.min_tokens:
        if not params.ignore_eos and token in request.eos_token_ids:
            return "stop", None
        if params.stop_token_ids and token in params.stop_token_ids:
            return "stop", token
    if sequence.num_tokens >= sequence.max_len:
        return "length", None
    return None, None


def _update(
    sequence: Sequence,
    tokens: list[int],
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
    timings: Timings | None = None,
    reason: FinishReason | None = None,
    stop: int | str | None = None,
    index: int | None = None,
) -> SequenceUpdate:
    return SequenceUpdate(
        request_id=sequence.request.id,
        index=sequence.index if index is None else index,
        token_ids=tokens,
        finish_reason=reason,
        stop_reason=stop,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=sequence.num_cached,
        timings=timings,
    )
