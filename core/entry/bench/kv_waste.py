"""How much of a KV cache holds tokens: the paged cache, and reservations in one piece.

One trace is replayed without a model through the engine's own `Scheduler` and `BlockManager`, and
through simulators that reserve one contiguous chunk for each sequence when it starts, as engines did
before paging. All have the same pool of slots (a slot holds one token's keys and values), batch
continuously and serve in order of arrival. The accounting is that of Kwon et al. 2023
(PagedAttention), section 3.1 and figure 2; steps count only while a request waits for memory, since
without anyone waiting nothing is wasted.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean

import numpy as np

from octavo.core.admission import SchedulerLimits
from octavo.core.blocks import BlockManager
from octavo.core.config import ConfigError, nearest
from octavo.core.entry.bench.contiguous import ALLOCATORS, Allocator, Chunk
from octavo.core.params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.types import Request, StepPlan, StepResult

STATES = ("used", "reserved", "internal", "external", "free")

_SIGMA = 1.0  # of the logarithm of lengths, as in chat logs
TRACES: dict[str, tuple[float, float, int, int]] = {
    "sharegpt": (161.0, 338.0, 1000, 1),
    "alpaca": (19.0, 58.0, 5000, 2),
}
"""name -> (mean prompt, mean output tokens, requests, seed); the means are those of the paper's
figure 11."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request of a trace, in tokens."""

    prompt: int
    output: int

    @property
    def stored(self) -> int:
        """Slots it fills in the end: the last output token's keys and values are never needed."""
        return self.prompt + self.output - 1


@dataclass(frozen=True, slots=True)
class Pool:
    """What every strategy has to work with.

    slots: tokens that the KV cache can hold. max_num_batched_tokens: tokens computed in a step.
    """

    slots: int = 15_728  # OPT-13B's on a 40 GB device, in the paper's table 1
    block_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Usage:
    """The pool's slots in one step, by state; they add up to the pool.

    used: hold a token. reserved: held for tokens their owner will still bring. internal: held for
    tokens that never come. external: lost to the allocator: rounding, and holes that together would
    hold the next request but lie apart. free: fewer than the next request needs, wherever they lie.
    """

    used: int
    reserved: int
    internal: int
    external: int
    free: int

    @property
    def total(self) -> int:
        """Slots altogether."""
        return self.used + self.reserved + self.internal + self.external + self.free


Watch = Callable[[Usage, bool], None]
"""Told each step's usage, and whether a request waited for memory meanwhile."""


@dataclass
class Replay:
    """A trace's run under one strategy.

    `shares` are of the pool's slots, averaged over the `waiting_steps`; `running` is the mean number
    of sequences in these.
    """

    name: str
    slots: int
    steps: int = 0
    waiting_steps: int = 0
    running: float = 0.0
    preemptions: int = 0
    shares: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))

    @property
    def waste(self) -> float:
        """Share of the pool that is reserved or fragmented."""
        return self.shares["reserved"] + self.shares["internal"] + self.shares["external"]

    def add(self, usage: Usage, running: int, waiting: bool, watch: Watch | None) -> None:
        """Counts a step."""
        self.steps += 1
        if watch is not None:
            watch(usage, waiting)
        if waiting:
            self.waiting_steps += 1
            self.running += running
            for state in STATES:
                self.shares[state] += getattr(usage, state)

    def close(self) -> Replay:
        """Turns sums into means."""
        steps = max(self.waiting_steps, 1)
        self.running /= steps
        self.shares = {s: total / steps / self.slots for s, total in self.shares.items()}
        return self


# ------------------------------------------------------------------------------------------ traces


def make_trace(
    name: str, max_model_len: int, num_requests: int | None = None, seed: int | None = None
) -> list[Lengths]:
    """Log-normal lengths whose means are those of a data set.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in TRACES:
        raise ConfigError(
            f"unknown trace {name!r}{nearest(name, TRACES)}; there are {', '.join(TRACES)}"
        )
    prompt, output, count, own_seed = TRACES[name]
    count = num_requests or count
    draw = random.Random(own_seed if seed is None else seed)
    # By inversion: only random() is the same in every Python.
    normal = NormalDist()
    normals = [normal.inv_cdf(draw.random() or 0.5) for _ in range(2 * count)]
    half = max_model_len // 2
    prompts = _log_normal(normals[:count], prompt, half)
    outputs = _log_normal(normals[count:], output, half)
    return [Lengths(p, o) for p, o in zip(prompts, outputs, strict=True)]


def _log_normal(normals: Sequence[float], mean: float, most: int) -> list[int]:
    """exp(mu + sigma n), clipped to [1, most], with the mu that gives the trace the mean asked for."""

    def lengths(mu: float) -> list[int]:
        return [min(most, max(1, round(math.exp(mu + _SIGMA * n)))) for n in normals]

    low, high = 0.0, math.log(most)
    for _ in range(40):
        middle = (low + high) / 2
        if fmean(lengths(middle)) < mean:
            low = middle
        else:
            high = middle
    return lengths(high)


# ------------------------------------------------------------------------------------------- paged


def replay_paged(trace: Iterable[Lengths], pool: Pool, watch: Watch | None = None) -> Replay:
    """Replays through the engine's own scheduler and block manager, with a runner that computes
    nothing. The null block is part of the pool, and counts as internal fragmentation.

    Raises:
        RequestRefused: a request could never run in this pool.
    """
    blocks = BlockManager(pool.slots // pool.block_size, pool.block_size, prefix_caching=False)
    limits = SchedulerLimits(
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_model_len=pool.max_model_len,
        max_logits_rows=pool.max_num_seqs + 1,
        fcfs_only=True,
    )
    scheduler = Scheduler(blocks, limits)
    unfinished = 0
    for i, lengths in enumerate(trace):
        params = SamplingParams(temperature=0.0, max_tokens=lengths.output, ignore_eos=True)
        scheduler.add(Request(id=str(i), prompt_token_ids=[0] * lengths.prompt, params=params))
        unfinished += 1
    result = Replay(f"paged, block {pool.block_size}", pool.slots)
    while (plan := scheduler.schedule()) is not None:
        running = len(scheduler.running)
        waiting = unfinished > running and _room(plan.num_tokens, running, pool)
        result.add(_paged_usage(scheduler, plan, pool.slots), running, waiting, watch)
        drawn = sum(item.samples for item in plan.items)
        updates = scheduler.commit(plan, StepResult(np.zeros(drawn, np.int64), (), {}))
        unfinished -= sum(update.finish_reason is not None for update in updates)
    result.preemptions = scheduler.stats().preemptions
    return result.close()


def _room(tokens: int, running: int, pool: Pool) -> bool:
    """Whether one more request could have started, had there been memory."""
    return tokens < pool.max_num_batched_tokens and running < pool.max_num_seqs


def _paged_usage(scheduler: Scheduler, plan: StepPlan, slots: int) -> Usage:
    """While the step computes: its tokens count as written."""
    size = scheduler.blocks.block_size
    used = internal = held = 0
    counts = {id(item.sequence): item.count for item in plan.items}
    for sequence in scheduler.running:
        allocated = sequence.num_blocks * size
        held += allocated
        used += sequence.num_computed + counts.get(id(sequence), 0)
        internal += max(0, allocated - (sequence.max_len - 1))
    free = scheduler.blocks.num_free * size
    null_block = slots - scheduler.blocks.usable * size
    return Usage(used, held - internal - used, internal + null_block, 0, free)


# -------------------------------------------------------------------------------------- contiguous

Reserve = Callable[[Lengths, Pool], int]
RESERVATIONS: dict[str, Reserve] = {
    "max": lambda lengths, pool: pool.max_model_len,
    "power of two": lambda lengths, pool: min(
        pool.max_model_len, 1 << (lengths.stored - 1).bit_length()
    ),
    "oracle": lambda lengths, pool: lengths.stored,
}
"""name -> slots reserved for a request: as many as any could need, its final length rounded up, or
its final length exactly, which no engine can know."""


@dataclass(slots=True)
class _Held:
    lengths: Lengths
    reserved: int
    chunk: Chunk
    computed: int = 0


def replay_contiguous(
    trace: Iterable[Lengths],
    pool: Pool,
    reservation: str,
    allocator: str = "buddy",
    watch: Watch | None = None,
) -> Replay:
    """Replays with one chunk for each sequence, reserved when it starts and kept to its end.

    Raises:
        ConfigError: a request could never run in this pool.
    """
    memory: Allocator = ALLOCATORS[allocator](pool.slots)
    reserve = RESERVATIONS[reservation]
    waiting = deque(trace)
    most = max(reserve(lengths, pool) for lengths in waiting)
    if most > memory.largest:
        raise ConfigError(
            f"reservation {reservation!r} needs {most} slots in one piece; the {allocator} allocator "
            f"has at most {memory.largest} of {pool.slots}: give more --slots"
        )
    running: list[_Held] = []
    result = Replay(reservation, pool.slots)
    while waiting or running:
        budget = _advance(running, pool.max_num_batched_tokens)
        while waiting and budget > 0 and len(running) < pool.max_num_seqs:
            need = reserve(waiting[0], pool)
            if (chunk := memory.take(need)) is None:
                break
            held = _Held(waiting.popleft(), need, chunk)
            held.computed = min(budget, held.lengths.prompt)
            budget -= held.computed
            running.append(held)
        waits = bool(waiting) and budget > 0 and len(running) < pool.max_num_seqs
        need = reserve(waiting[0], pool) if waiting else 0
        usage = _contiguous_usage(running, memory.free, waits and memory.free >= need)
        result.add(usage, len(running), waits, watch)
        for held in running:
            if held.computed == held.lengths.stored:
                memory.give(held.chunk)
        running = [held for held in running if held.computed < held.lengths.stored]
    return result.close()


def _advance(running: list[_Held], budget: int) -> int:
    """Gives each decoding sequence its token and each prompt its next part, as the engine's scheduler
    does; returns what is left of the budget."""
    for held in running:
        if held.computed >= held.lengths.prompt:
            held.computed += 1
            budget -= 1
    for held in running:
        if held.computed < held.lengths.prompt:
            part = min(budget, held.lengths.prompt - held.computed)
            held.computed += part
            budget -= part
    return budget


def _contiguous_usage(running: list[_Held], free: int, apart: bool) -> Usage:
    """apart: the free slots would hold the next request if they lay together."""
    used = sum(held.computed for held in running)
    needed = sum(held.lengths.stored for held in running)
    reserved = sum(held.reserved for held in running)
    handed_out = sum(held.chunk[1] for held in running)
    return Usage(
        used=used,
        reserved=needed - used,
        internal=reserved - needed,
        external=handed_out - reserved + (free if apart else 0),
        free=0 if apart else free,
    )


def replay_all(trace: Sequence[Lengths], pool: Pool, allocator: str = "buddy") -> list[Replay]:
    """Every strategy on the same trace, the paged cache last."""
    found = [replay_contiguous(trace, pool, name, allocator) for name in RESERVATIONS]
    return [*found, replay_paged(trace, pool)]
