"""Random mixes of requests for the null engine of `support`, and what must hold when they are played."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from support import EOS, VOCAB, Rig, expected_embedding, expected_tokens, request, rig

from octavo.core.contract import Lane
from octavo.core.lanes import LaneSet
from octavo.core.params import RequestRefused
from octavo.core.pooling import Pooling
from octavo.core.scheduler import MAX_PREEMPTIONS
from octavo.core.types import Request, StepPlan
from octavo.core.waiting import MAX_PREFIX_WAITS


@dataclass(frozen=True)
class Arrival:
    """A request that comes before step `at`."""

    at: int
    prompt_length: int
    shared: int  # leading tokens taken from a common text
    max_tokens: int | None
    n: int = 1
    priority: int = 0
    seed: int | None = None
    prompt_logprobs: bool = False
    salt: str | None = None
    stops: bool = False
    pool: str | None = None  # it is embedded, and nothing is drawn


@dataclass(frozen=True)
class Abort:
    """Before step `at`, or while it runs, request number `target` ends, or its sample `index`."""

    at: int
    target: int
    index: int | None
    midway: bool = False


@dataclass(frozen=True)
class Scenario:
    blocks: int
    block_size: int
    budget: int
    max_num_seqs: int
    rows: int
    chunk_multiple: int
    max_model_len: int
    prefix_caching: bool
    arrivals: tuple[Arrival, ...]
    aborts: tuple[Abort, ...]
    failures: tuple[int, ...] = ()  # steps that fail
    lanes: tuple[Lane, ...] = ()
    rest: int = 0  # steps that a freed block rests
    losses: bool = False  # whether a step that fails takes the KV cache with it
    host: int = 0  # blocks in host memory
    mode: str = "swap"


_COMMON = [random.Random(1).randrange(VOCAB) for _ in range(4096)]


def scenario_request(number: int, a: Arrival) -> Request:
    dice = random.Random(number)
    prompt = _COMMON[: a.shared] + [
        dice.randrange(VOCAB) for _ in range(a.prompt_length - a.shared)
    ]
    if a.pool is not None:
        return request(
            str(number),
            prompt[: a.prompt_length],
            max_tokens=0,
            priority=a.priority,
            cache_salt=a.salt,
            pooling=Pooling(a.pool),  # type: ignore[arg-type]
        )
    return request(
        str(number),
        prompt[: a.prompt_length],
        eos=EOS if a.stops else (),
        max_tokens=a.max_tokens,
        n=a.n,
        priority=a.priority,
        seed=a.seed,
        temperature=0.0 if a.seed is None else 1.0,
        prompt_logprobs=0 if a.prompt_logprobs else None,
        cache_salt=a.salt,
        stop_token_ids=list(range(20, 40)) if a.stops else None,
    )


def play(s: Scenario) -> tuple[int, Rig]:
    """Runs a scenario to its end and checks all that must hold. Returns its steps."""
    r = rig(
        blocks=s.blocks, block_size=s.block_size, budget=s.budget, max_num_seqs=s.max_num_seqs,
        rows=s.rows, chunk_multiple=s.chunk_multiple, max_model_len=s.max_model_len,
        prefix_caching=s.prefix_caching, lanes=s.lanes, rest=s.rest, host=s.host, mode=s.mode,
    )  # fmt: skip
    failed: set[tuple[str, int]] = set()

    def fail(plan: StepPlan) -> None:
        if plan.step in s.failures:
            for item in plan.items:
                name = item.sequence.request.id
                failed.update((name, i) for i in r.scheduler.roster.indices(item.sequence))
            raise RuntimeError("out of luck")

    r.runner.hook = fail
    r.runner.loses = set(s.failures) if s.losses else set()
    requests = [scenario_request(i, a) for i, a in enumerate(s.arrivals)]
    refused: set[str] = set()
    aborted: dict[tuple[str, int], str] = {}
    numbers = {id(a): i for i, a in enumerate(s.arrivals)}
    pool = (s.blocks - 1) * s.block_size
    work = sum(
        min(s.max_model_len, a.prompt_length + (a.max_tokens or s.max_model_len)) * a.n
        for a in s.arrivals
    )

    def abort(event: Abort) -> None:
        if event.target >= len(requests):
            return
        name = str(event.target)
        before = dict(r.finished)
        r.take(r.engine.abort([name if event.index is None else (name, event.index)]))
        new = set(r.finished) - set(before)
        if event.index is not None:
            assert new <= {(name, event.index)}
        aborted.update(dict.fromkeys(new, "abort" if event.index is None else "stop"))

    midway = [a for a in s.aborts if a.midway]

    def abort_midway(_: StepPlan) -> None:
        for event in midway:
            if event.at == now:
                abort(event)
                r.scheduler.check()

    r.runner.after = abort_midway
    events = sorted([*s.arrivals, *(a for a in s.aborts if not a.midway)], key=lambda e: e.at)
    bound = (MAX_PREEMPTIONS + 2 + len(s.failures) * s.losses) * work + len(events) + 10
    steps = now = 0
    while events or r.engine.has_unfinished():
        while events and (events[0].at <= now or not r.engine.has_unfinished()):
            event = events.pop(0)
            if isinstance(event, Arrival):
                name = str(numbers[id(event)])
                try:
                    r.engine.add(requests[int(name)])
                except RequestRefused as error:
                    refused.add(name)
                    assert sum(c.isdigit() for c in str(error)) >= 2, error
            else:
                abort(event)
            r.scheduler.check()
        if r.engine.has_unfinished():
            r.step()
            steps += 1
            assert steps <= bound, f"{steps} steps for {work} tokens"
            assert all(q.prefix_waits <= MAX_PREFIX_WAITS for q in r.scheduler.sequences())
        now += 1
    r.check_empty()
    for q in requests:
        keys = [(q.id, k) for k in range(q.params.n)]
        if q.id in refused:
            assert not any(k in r.finished for k in keys)
            continue
        for key in keys:
            if key not in r.finished:
                raise AssertionError(f"{key} never ended")
            wanted = expected_tokens(q, key[1], s.max_model_len, pool)
            got, reason = r.tokens[key], r.finished[key].finish_reason
            if key in failed:
                assert got == wanted[: len(got)] and reason == "error"
            elif key in aborted:
                assert got == wanted[: len(got)] and reason == aborted[key]
            elif q.pooling is not None:
                assert (got, reason) == ([], "stop")
                assert r.finished[key].embedding == expected_embedding(q), key
            else:
                assert got == wanted, key
                assert reason in ("stop", "length")
        if q.params.prompt_logprobs is not None and not {keys[0]} & (failed | set(aborted)):
            entries = r.prompt_logprobs[q.id]
            assert [e.token_id for e in entries] == q.prompt_token_ids[1:]
            assert [e.logprob for e in entries] == [-float(p + 1) for p in range(len(entries))]
    return steps, r


def random_scenario(dice: random.Random) -> Scenario:
    """A scenario drawn from wide ranges: tiny pools and budgets are as likely as ample ones."""
    size = dice.choice([1, 2, 3, 4, 8, 16])
    longest = dice.choice([8, 24, 60, 150])
    need = math.ceil(longest / size)
    count = dice.randint(1, 14)
    crowd = dice.random() < 0.3  # they come at once, with the same beginning
    arrivals = tuple(
        Arrival(
            at=dice.randint(0, 2 if crowd else 40),
            prompt_length=(length := dice.randint(1, longest)),
            shared=dice.choice([length // 2, length] if crowd else [0, 0, length // 2, length]),
            max_tokens=dice.choice([None, 0, 1, dice.randint(1, 4 if crowd else 40)]),
            n=dice.choice([1, 1, 1, 2, 3, 5]),
            priority=dice.choice([0, 0, 0, -1, 1]),
            seed=dice.choice([None, dice.randint(0, 99)]),
            prompt_logprobs=dice.random() < 0.15,
            salt=dice.choice([None, None, "a"]),
            stops=dice.random() < 0.5,
            pool=dice.choice([None] * 5 + ["mean", "last", "cls"]),
        )
        for _ in range(count)
    )
    aborts = tuple(
        Abort(
            dice.randint(0, 60),
            dice.randrange(count),
            dice.choice([None, 0, 1, 2]),
            dice.random() < 0.5,
        )
        for _ in range(dice.choice([0, 0, 1, 4, 8]))
    )
    failures = tuple(dice.randint(1, 40) for _ in range(dice.choice([0, 0, 0, 1, 3])))
    return Scenario(
        blocks=1
        + dice.choice([max(1, need // 2), need, need + 1, 2 * need, 3 * need + 2, 20 * need]),
        block_size=size,
        budget=dice.choice([8, 32, 200] if crowd else [1, 2, 3, 5, 8, 32, 200]),
        max_num_seqs=dice.choice([5, 8, 32] if crowd else [1, 2, 3, 5, 8, 32]),
        rows=dice.choice([1, 4, 16, 300]),
        chunk_multiple=dice.choice([1, 1, 4]),
        max_model_len=longest,
        prefix_caching=dice.random() < (0.95 if crowd else 0.7),
        arrivals=arrivals,
        aborts=aborts,
        failures=failures,
        losses=dice.random() < 0.5,
        rest=dice.choice([0, 0, 1, 3]),
    )


LANE_SHAPES = ("exclusive", "whole", "beside", "bucketed", "decode and mixed", "short and long")


def random_lanes(dice: random.Random, s: Scenario) -> Scenario:
    """The same scenario over lanes: of prompts and of decoding apart, in one step or in two, prompts in
    chunks or whole, with limits and buckets of any size."""
    shape = dice.choice(LANE_SHAPES)
    widest = math.ceil(s.max_model_len / s.block_size)

    def lane(*kinds: str, **changes: object) -> Lane:
        tokens = dice.choice([4, 9, 40, s.max_model_len + 3])
        seqs = dice.choice([1, 2, 5, 16])
        rows = dice.choice([2, 7, 40])
        values: dict[str, object] = {
            "max_seqs": seqs,
            "max_tokens": tokens,
            "chunk_multiple": dice.choice([1, 1, 4]),
            "exclusive": shape in ("exclusive", "whole", "short and long"),
            "chunked": shape != "whole",
        }
        if shape == "bucketed" or dice.random() < 0.5:
            values |= {
                "token_buckets": tuple(sorted({4, max(4, tokens // 2), tokens + 4})),
                "seq_buckets": tuple(sorted({1, seqs})),
                "block_buckets": tuple(sorted({max(1, widest // 2), widest, widest + 3})),
                "row_buckets": tuple(sorted({1, rows})),
            }
        return Lane(kinds=kinds, **(values | changes))  # type: ignore[arg-type]

    if shape == "bucketed":
        lanes = [lane("mixed")]
    elif shape == "decode and mixed":
        lanes = [lane("decode"), lane("mixed")]
    elif shape == "short and long":
        lanes = [lane("prefill"), lane("prefill"), lane("decode")]
    else:
        lanes = [lane("prefill"), lane("decode")]
    dice.shuffle(lanes)
    rows = max(s.rows, s.max_num_seqs + 1, 40)
    made = LaneSet(lanes, rows)
    return replace(
        s, lanes=tuple(lanes), rows=rows, max_num_seqs=min(s.max_num_seqs, made.max_num_seqs)
    )
