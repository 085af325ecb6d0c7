"""A model that is a hash function: the real scheduler and engine, without a chip or weights.

The KV cache is one number per slot. The number at position p is computed from the number that the
cache holds at position p - 1, read through the block table, and from token p. So it spells the whole
sequence up to p, and a block that was shared, copied, evicted or overwritten wrongly shows at once:
the runner compares every scheduled sequence's slots with what they must hold, and the next token is a
hash of the last slot.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from octavo.core.admission import SchedulerLimits
from octavo.core.batch import BatchBuilder, prompt_logprob_rows
from octavo.core.blocks import BlockManager, root_hash
from octavo.core.contract import Lane
from octavo.core.drafting.speculation import Speculation
from octavo.core.engine import Engine, ModelInfo
from octavo.core.host_pool import HostPool
from octavo.core.params import SamplingParams
from octavo.core.scheduler import MAX_PREEMPTIONS, Scheduler
from octavo.core.sequence import Sequence
from octavo.core.swap import Swap
from octavo.core.types import (
    Batch,
    Request,
    ScheduledTokens,
    SequenceUpdate,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.core.waiting import MAX_PREFIX_WAITS, WaitingQueue

VOCAB = 997
EOS = (2, 7)
_MASK = 2**64 - 1
_WEIGHTS = np.random.default_rng(7).integers(1, 2**63, 1 << 13, dtype=np.uint64) | np.uint64(1)


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _root(request: Request) -> int:
    root = root_hash(request.adapter, request.cache_salt, request.image_hashes)
    return int.from_bytes(root[:8], "little")


def content(root: int, tokens: np.ndarray, start: int = 0, before: int | None = None) -> np.ndarray:
    """The KV numbers of tokens at positions `start`…, after the number `before` (or the root)."""
    with np.errstate(over="ignore"):
        steps = (tokens.astype(np.uint64) + np.uint64(1)) * _WEIGHTS[start : start + len(tokens)]
        return np.cumsum(steps, dtype=np.uint64) + np.uint64(root if before is None else before)


def token_after(last: int, params: SamplingParams, seed: int) -> int:
    return mix((last ^ (0 if params.greedy else seed)) & _MASK) % VOCAB


def expected_tokens(request: Request, index: int, max_model_len: int, pool: int) -> list[int]:
    """What sample `index` of a request must put out, computed without scheduler and cache."""
    params, tokens = request.params, list(request.prompt_token_ids)
    longest = (
        min(max_model_len, len(tokens) + params.max_tokens)
        if params.max_tokens is not None
        else (min(max_model_len, pool + 1))
    )
    seed = ((params.seed or 0) + index * 0x9E3779B97F4A7C15) & _MASK
    last = int(content(_root(request), np.array(tokens))[-1])
    out: list[int] = []
    stops = set(params.stop_token_ids or ()) | set(
        () if params.ignore_eos else request.eos_token_ids
    )
    while len(tokens) + len(out) < longest:
        token = token_after(last, params, seed)
        out.append(token)
        position = len(tokens) + len(out) - 1
        last = (last + (token + 1) * int(_WEIGHTS[position])) & _MASK
        if token in stops and len(out) >= params.min_tokens:
            break
    return out


def expected_embedding(request: Request) -> bytes:
    """What an embedded prompt must give, computed at once."""
    assert request.pooling is not None
    values = content(_root(request), np.array(request.prompt_token_ids))
    with np.errstate(over="ignore"):
        sums = {"last": values[-1], "cls": values[0], "mean": values.sum(dtype=np.uint64)}
    return sums[request.pooling.kind].tobytes()


class AuditFailure(BaseException):
    """A plan or the KV cache is wrong. No `Exception`: an engine ends a step's requests on those."""


class WatchedBlocks(BlockManager):
    """Knows of every free block since which step nobody owns it."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool, rest: int) -> None:
        super().__init__(num_blocks, block_size, prefix_caching, rest, self._drained)
        self.freed: dict[int, int] = {}
        self.now = self.drains = 0

    def free(self, blocks: SequenceOf[int]) -> None:
        super().free(blocks)
        self.freed.update({block: self.now for block in blocks if self._refs[block] == 0})

    def _drained(self) -> None:
        self.drains += 1
        self.freed.clear()

    def audit(self, written: Iterable[int], step: int) -> None:
        """That the device reads none of these blocks for a former owner any more."""
        for block in written:
            since = step - self.freed.pop(block, -(10**9))
            assert since > self._rest, f"block {block} is written {since} steps after it was freed"


class NullRunner:
    """Computes steps on numbers, and audits every plan on the way.

    forced: request id -> tokens it puts out, whatever its hash says.
    """

    def __init__(
        self, blocks: BlockManager, limits: SchedulerLimits, lane: Lane | None = None
    ) -> None:
        self.blocks, self.limits = blocks, limits
        self.lane = lane or Lane(
            max_seqs=limits.max_num_seqs, max_tokens=limits.max_num_batched_tokens
        )
        lanes = limits.lanes or (self.lane,)
        self.builders = [
            BatchBuilder(lane, blocks.block_size, index=i) for i, lane in enumerate(lanes)
        ]
        self.lanes_used: Counter[tuple[int, ...]] = Counter()
        self.kv = np.zeros(blocks.num_blocks * blocks.block_size, np.uint64)
        self.host: dict[int, np.ndarray] = {}  # by slot
        self.forced: dict[str, list[int]] = {}
        self.hook: Callable[[StepPlan], None] | None = None
        self.after: Callable[[StepPlan], None] | None = None  # once computed, before the commit
        self.steps = 0
        self.loses: set[int] = set()
        self.losses = 0
        self.copies = 0
        self.closed = False
        self._pooled: dict[str, bytes] = {}
        self.waiting: WaitingQueue | None = None  # audited too where it is told
        self.longest_whole = limits.lane_set().longest_whole
        self.chunked = self.longest_whole is None

    def _pool(self, item: ScheduledTokens, values: np.ndarray) -> bytes | None:
        """An embedding: the KV number of the last or the first position, or the sum of all."""
        sequence, kind = item.sequence, item.sequence.request.pooling.kind
        position, before = sequence.draw_state if item.start and kind != "last" else (0, 0)
        assert kind == "last" or position == item.start, "a part is missing, or counts twice"
        with np.errstate(over="ignore"):
            if kind == "last":
                found = values[-1]
            elif kind == "cls":
                found = before if item.start else values[0]
            else:
                found = values.sum(dtype=np.uint64) + (before if item.start else np.uint64(0))
        sequence.draw_state = item.start + item.count, found
        return found.tobytes() if item.start + item.count == sequence.num_tokens else None

    def execute(self, step: StepPlan) -> StepResult:
        try:
            result = self._execute(step)
        except AssertionError as error:
            raise AuditFailure(str(error)) from error
        if self.after is not None:
            self.after(step)
        return result

    def _execute(self, step: StepPlan) -> StepResult:
        self.steps += 1
        if self.hook is not None:
            self.hook(step)
        self._audit(step)
        size = self.blocks.block_size
        pages = self.kv.reshape(-1, size)
        if isinstance(self.blocks, WatchedBlocks):
            self.blocks.now = step.step
            self.blocks.audit((target for _, target in step.copies), step.step)
            self.blocks.audit((target for _, target in step.swap_in), step.step)
        for block, slot in step.swap_out:
            self.host[slot] = pages[block].copy()
        self.copies += len(step.copies)
        for source, target in step.copies:
            pages[target] = pages[source]
        for slot, target in step.swap_in:
            pages[target] = self.host[slot]
        self.lanes_used[tuple(part.lane for part in step.parts)] += 1
        results = [self._compute(part) for part in step.parts]
        prompt = {k: v for result in results for k, v in result.prompt_logprobs.items()}
        pooled, self._pooled = self._pooled, {}
        tokens = np.concatenate([result.tokens for result in results])
        return StepResult(tokens, (), prompt, pooled=pooled)

    def _compute(self, part: StepPlan) -> StepResult:
        """One lane's batch."""
        size = self.blocks.block_size
        batch = self.builders[part.lane].build(part)
        self._audit_lane(part, batch)
        assert batch.num_tokens == part.num_tokens
        slots, table = batch.slots[0], batch.block_tables[0]
        written = slots[: batch.num_tokens]
        assert len(np.unique(written)) == len(written), "a slot is written twice in one step"
        assert (slots[batch.num_tokens :] == -1).all()
        owned = np.unique(written // size)
        if isinstance(self.blocks, WatchedBlocks):
            self.blocks.audit(owned.tolist(), part.step)
        for block in owned.tolist():
            assert block and self.blocks._refs[block] == 1, f"block {block} is written while shared"
            assert self.blocks._hash_of[block] is None, f"block {block} is written while cached"
        bases = []
        for i in range(batch.num_seqs):
            start = int(batch.positions[batch.query_start[i]])
            before = table[i, (start - 1) // size] * size + (start - 1) % size if start else 0
            bases.append(int(self.kv[before]) if start else None)
        for i, item in enumerate(part.items):
            first, end = int(batch.query_start[i]), int(batch.query_start[i + 1])
            root = _root(item.sequence.request)
            values = content(
                root, batch.token_ids[first:end], int(batch.positions[first]), bases[i]
            )
            self.kv[slots[first:end]] = values
            if item.sequence.request.pooling is not None:
                assert not item.samples and not item.all_logits
                if (embedding := self._pool(item, values)) is not None:
                    self._pooled[item.sequence.request.id] = embedding
        for i, item in enumerate(part.items):
            self._verify(
                item.sequence, table[i], int(batch.context_lens[i]), item.start + item.count
            )
        assert not batch.logits_rows[batch.num_rows :].any()
        rows = batch.logits_rows[: batch.num_rows]
        drawn = sum(item.samples for item in part.items)
        assert rows[:drawn].tolist() == [
            int(batch.query_start[i + 1]) - (item.samples - k if item.drafts else 1)
            for i, item in enumerate(part.items)
            for k in range(item.samples)
        ]
        assert len(rows) - drawn == sum(len(prompt_logprob_rows(item)) for item in part.items)
        return self.draw(part, self.kv[slots[rows]])

    def draw(self, step: StepPlan, rows: np.ndarray) -> StepResult:
        """The step's result from the KV numbers at its rows of logits."""
        samples = [(item, k) for item in step.items for k in range(item.samples)]
        tokens = [
            self._token(item.sequence, 0 if item.drafts else k, int(last), k if item.drafts else 0)
            for (item, k), last in zip(samples, rows, strict=False)
        ]
        prompt = {
            item.sequence.request.id: [
                TokenLogprobs(int(item.sequence.tokens[p + 1]), -float(p + 1), 1, [], [])
                for p in prompt_logprob_rows(item)
            ]
            for item in step.items
            if item.all_logits
        }
        return StepResult(np.array(tokens, np.int64), (), prompt)

    compilations = 0

    def recover(self) -> bool:
        """After a failed step in `loses` the cache is gone: reads as what nobody wrote."""
        if self.steps not in self.loses:
            return False
        self.losses += 1
        self.kv[:] = 0
        return True

    def close(self) -> None:
        self.closed = True

    @staticmethod
    def is_last_part(sequence: Sequence, end: int) -> bool:
        """Whether what is computed up to `end` is all there is."""
        return end == sequence.num_tokens

    def _audit_lane(self, part: StepPlan, batch: Batch) -> None:
        """That a batch holds what its lane takes, and no more of it than the lane says."""
        lanes = self.limits.lanes
        if not lanes:
            return
        lane = lanes[part.lane]
        assert batch.lane == part.lane
        rows = sum(item.samples + len(prompt_logprob_rows(item)) for item in part.items)
        for value, most, buckets in (
            (len(part.items), lane.max_seqs, lane.seq_buckets),
            (part.num_tokens, lane.max_tokens, lane.token_buckets),
            (rows, self.limits.max_logits_rows, lane.row_buckets),
            (max(i.sequence.num_blocks for i in part.items), 10**9, lane.block_buckets),
        ):
            assert value <= min(most, max(buckets, default=most)), (part, value)
        for item in part.items:
            done = self.is_last_part(item.sequence, item.start + item.count)
            if lane.kinds == ("decode",):
                assert item.count == 1 and item.start and not item.all_logits
                assert item.samples == 1 or not self.chunked
            if not done and self.chunked:
                assert item.count % lane.chunk_multiple == 0
            if not self.chunked:
                assert not item.start or item.count == 1, "a prompt was cut that is computed whole"
                assert done or item.start or item.count == self.longest_whole
        if lane.kinds in (("decode",), ("prefill",)):
            assert batch.kind == lane.kinds[0]

    def _token(self, sequence: Sequence, sample: int, last: int, ahead: int = 0) -> int:
        """ahead: drafts between the sequence's tokens and the place that is drawn for."""
        forced = self.forced.get(sequence.request.id)
        if forced is not None:
            return forced[min(sequence.num_output + ahead, len(forced) - 1)]
        return token_after(last, sequence.request.params, sequence.sample_seed(sample))

    def _verify(self, sequence: Sequence, row: np.ndarray, context: int, end: int) -> None:
        assert context == end
        at = np.arange(context)
        held = self.kv[
            row[at // self.blocks.block_size] * self.blocks.block_size + at % self.blocks.block_size
        ]
        right = content(_root(sequence.request), sequence.tokens[:context])
        if not (held == right).all():
            place = int(np.argmax(held != right))
            raise AssertionError(
                f"{sequence.request.id}/{sequence.index}: position {place} of {context} holds another "
                f"sequence's KV (block {row[place // self.blocks.block_size]})"
            )

    def _audit(self, step: StepPlan) -> None:
        limits = self.limits
        assert step.items, "an empty plan"
        assert limits.lanes or step.num_tokens <= limits.max_num_batched_tokens
        assert len(step.items) <= limits.max_num_seqs
        rows = sum(i.samples + len(prompt_logprob_rows(i)) for i in step.items)
        assert len({part.lane for part in step.parts}) == len(step.parts)
        assert len(step.parts) == 1 or not any(limits.lanes[p.lane].exclusive for p in step.parts)
        assert rows <= limits.max_logits_rows, f"{rows} rows of logits in a step"
        names = [(i.sequence.request.id, i.sequence.index) for i in step.items]
        assert len(set(names)) == len(names), "a sequence stands twice in a plan"
        targets = [target for _, target in step.copies]
        targets += [target for _, target in step.swap_in]
        assert len(set(targets)) == len(targets), "a block is copied to twice"
        slots = [slot for _, slot in step.swap_out]
        assert len(set(slots)) == len(slots), "a block of the host is copied to twice"
        assert all(block for block, _ in step.swap_out), "the null block is swapped out"
        targets = [target for _, target in step.copies]
        owners = defaultdict(int)
        for item in step.items:
            self._audit_start(item.sequence)
            assert item.sequence.running
            assert item.count >= 1 and item.start == item.sequence.num_computed
            for block in item.sequence.blocks:
                owners[block] += 1
        for target in targets:
            assert owners[target] == 1 and self.blocks._refs[target] == 1, (
                "a copy nobody owns alone"
            )

    def _audit_start(self, sequence: Sequence) -> None:
        """Nobody starts on a block that another is computing, unless it has waited often enough."""
        known, size = sequence.num_remembered, self.blocks.block_size
        if self.waiting is None or sequence.num_computed != known * size:
            return
        if known < min(sequence.num_promised, (sequence.num_tokens - 1) // size):
            maker = self.waiting._promises.get(sequence.hashes[known])
            assert maker is sequence or sequence.prefix_waits == MAX_PREFIX_WAITS, (
                f"{sequence.request.id} computes what another is computing"
            )


@dataclass
class Rig:
    """A null engine and what its requests have put out so far."""

    engine: Engine
    runner: NullRunner
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[tuple[str, int], SequenceUpdate] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], list[TokenLogprobs]] = field(
        default_factory=lambda: defaultdict(list)
    )
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(
        default_factory=lambda: defaultdict(list)
    )
    worst_preemptions: int = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def take(self, updates: Iterable[SequenceUpdate]) -> None:
        for update in updates:
            key = (update.request_id, update.index)
            assert key not in self.finished, f"{key} went on after its end"
            self.tokens[key].extend(update.token_ids)
            self.logprobs[key].extend(update.logprobs or [])
            if update.prompt_logprobs:
                self.prompt_logprobs[update.request_id].extend(update.prompt_logprobs)
            if update.finish_reason is not None:
                self.finished[key] = update

    def step(self) -> list[SequenceUpdate]:
        updates = self.engine.step()
        self.take(updates)
        self.scheduler.check()
        for sequence in self.scheduler.sequences():
            self.worst_preemptions = max(self.worst_preemptions, sequence.preemptions)
        assert self.worst_preemptions <= MAX_PREEMPTIONS + 1
        return updates

    def run(self, bound: int = 100_000) -> int:
        """Steps until all is done; returns how many it took."""
        for steps in range(bound):
            if not self.engine.has_unfinished():
                return steps
            self.step()
        raise AssertionError(f"unfinished after {bound} steps: {self.scheduler.stats()}")

    def check_empty(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        self.scheduler.blocks.settle()
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.usable
        assert not self.scheduler.running and not list(self.scheduler.sequences())
        assert self.scheduler.roster.slots_taken == 0
        if (swap := self.scheduler.swap) is not None:
            swap.begin_step()
            assert swap.pool.num_pinned == 0


def model_info(max_model_len: int = 4096, **changes: object) -> ModelInfo:
    values: dict[str, object] = {
        "name": "null", "architecture": "Null", "max_model_len": max_model_len, "vocab_size": VOCAB,
        "eos_token_ids": EOS, "device": "null", "device_reason": "", "backend": "null", "dtype": "float32",
        "kv_dtype": "float32", "block_size": 16, "num_kv_blocks": 0, "kv_bytes": 0, "weight_bytes": 0,
        "max_num_seqs": 0, "max_num_batched_tokens": 0, "tasks": ("generate", "embed"),
    }  # fmt: skip
    return ModelInfo(**{**values, **changes})  # type: ignore[arg-type]


def rig(
    *,
    blocks: int = 1000,
    block_size: int = 16,
    max_num_seqs: int = 64,
    budget: int = 512,
    max_model_len: int = 4096,
    rows: int = 512,
    chunk_multiple: int = 1,
    prefix_caching: bool = True,
    fcfs_only: bool = False,
    rest: int = 0,
    lane: Lane | None = None,
    lanes: tuple[Lane, ...] = (),
    runner: Callable[[BlockManager, SchedulerLimits, Lane | None], NullRunner] | None = None,
    speculation: Speculation | None = None,
    host: int = 0,
    mode: str = "swap",
    block_seconds: float = 0.0,
) -> Rig:
    """A null engine; `blocks` includes the null block, `host` are those in host memory."""
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        max_logits_rows=max(rows, max_num_seqs + 1),
        chunk_multiple=chunk_multiple,
        fcfs_only=fcfs_only,
        lanes=lanes,
    )
    manager = WatchedBlocks(blocks, block_size, prefix_caching, rest)
    made = (runner or NullRunner)(manager, limits, lane)
    swap = Swap(manager, HostPool(host), mode, block_seconds) if host else None
    scheduler = Scheduler(manager, limits, speculation=speculation, swap=swap)
    made.waiting = scheduler.roster.waiting
    return Rig(Engine(scheduler, made, model_info(max_model_len)), made)


def request(
    name: str, prompt: int | list[int], *, eos: tuple[int, ...] = (), **params: object
) -> Request:
    """A request; a prompt given by length is random, and its own by `name`. Greedy unless told otherwise."""
    fields = {
        k: params.pop(k)
        for k in ("priority", "cache_salt", "adapter", "image_hashes", "pooling")
        if k in params
    }
    if isinstance(prompt, int):
        dice = random.Random(name)
        prompt = [dice.randrange(VOCAB) for _ in range(prompt)]
    params.setdefault("temperature", 0.0)
    return Request(
        id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        eos_token_ids=eos,
        **fields,  # type: ignore[arg-type]
    )
