"""Cases of the whole engine: tiny random models give the portable ops' greedy tokens, whatever the scheduler
does on the way, and no block is lost."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.engine import Engine
from octavo.core.loading.errors import ModelError
from octavo.core.params import RequestRefused, SamplingParams
from octavo.core.types import Request, SequenceUpdate
from octavo.plugins import Backend
from octavo.plugins.conformance import tiny
from octavo.plugins.conformance.case import (
    Case,
    Dice,
    Failed,
    Finding,
    NotOffered,
    Refused,
    demand,
    within,
)
from octavo.plugins.conformance.subject import Portable, Subject
from octavo.plugins.conformance.tolerance import LOGPROB_TOLERANCE, TIE
from octavo.plugins.manager import Resolved

Tokens = dict[tuple[str, int], list[int]]
"""By request and sample."""


@contextmanager
def engine(backend: Backend, device: str, folder: Path, **options: Any) -> Iterator[Engine]:
    """An engine on a backend, shut down at the end."""
    from octavo.core.entry.wiring import build_engine

    values = {"max_num_seqs": 8, "max_logprobs": -1, "load_progress": False, "packed_cache": False}
    config = EngineConfig.from_kwargs(model=folder, device=device, **{**values, **options})
    made = build_engine(config, resolved=Resolved(backend, device, "given to the conformance kit"))
    try:
        yield made
    finally:
        made.shutdown()


def ask(name: str, prompt: list[int], count: int, **params: Any) -> Request:
    """A greedy request, unless `params` say otherwise."""
    values = {"temperature": 0.0, "max_tokens": count, **params}
    return Request(id=name, prompt_token_ids=prompt, params=SamplingParams(**values))


@dataclass
class Run:
    """What an engine gave to some requests, with its blocks audited after every step."""

    tokens: Tokens = field(default_factory=dict)
    updates: list[SequenceUpdate] = field(default_factory=list)

    def go(
        self,
        made: Engine,
        requests: Sequence[Request],
        between: Callable[[int], None] | None = None,
    ) -> Run:
        for request in requests:
            made.add(request)
        steps = 0
        while made.has_unfinished():
            self.take(made.step())
            made.scheduler.check()
            steps += 1
            if between is not None:
                between(steps)
        used = made.stats().kv_blocks_used
        demand(used == 0, f"{used} blocks are still held when every request has ended")
        return self

    def take(self, updates: Sequence[SequenceUpdate]) -> None:
        for update in updates:
            if update.finish_reason == "error":
                raise Failed(
                    f"request {update.request_id} ended with an error: {update.stop_reason}"
                )
            self.tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
            self.updates.append(update)


@dataclass
class Trial:
    """One model, on the backend and on the portable ops."""

    subject: Subject
    folder: Path
    dtype: str
    kv_dtype: str
    block_size: int
    excused: int = 0

    def options(self, **more: Any) -> dict[str, Any]:
        values = {"dtype": self.dtype, "kv_cache_dtype": self.kv_dtype, "block_size": self.block_size,
                  "num_kv_blocks": 64, "max_model_len": 3 * self.block_size + 200,
                  "max_num_seqs": self.subject.size(8, 4),
                  # Every prompt whole, and no larger shapes to run at the start than that takes.
                  "max_num_batched_tokens": max(self.subject.static(128, 256), 2 * self.block_size + 64)}  # fmt: skip
        return {**values, **more}

    @contextmanager
    def engine(self, **more: Any) -> Iterator[Engine]:
        """An engine on the backend under test."""
        with engine(
            self.subject.backend, self.subject.device, self.folder, **self.options(**more)
        ) as made:
            yield made

    def compare(self, requests: Sequence[Request], found: Tokens) -> None:
        """Raises Failed unless each sample's tokens are those that its prompt gives alone on the portable
        ops. Where two tokens are nearer than `TIE` the sequences may part; that is counted."""
        kv = self.kv_dtype if self.kv_dtype in ("float32", "float16", "bfloat16") else self.dtype
        options = self.options(
            kv_cache_dtype=kv, block_size=16, num_kv_blocks=200, enable_prefix_caching=False,
            max_num_batched_tokens=1024,
        )  # fmt: skip
        with engine(Portable(), "portable", self.folder, **options) as made:
            for r in requests:
                count = r.params.max_tokens or 0
                run = Run().go(made, [ask(r.id, list(r.prompt_token_ids), count, logprobs=5)])
                for index in range(r.params.n):
                    if (r.id, index) in found:
                        self._same(r.id, found[r.id, index], run)

    def _same(self, name: str, got: list[int], run: Run) -> None:
        wanted = run.tokens[name, 0]
        caps = self.subject.capabilities
        entries = [e for u in run.updates if u.request_id == name for e in u.logprobs or ()]
        for at, (mine, theirs) in enumerate(zip(got, wanted, strict=False)):
            if mine == theirs:
                continue
            near = dict(zip(entries[at].top_ids, entries[at].top_logprobs, strict=True))
            gap = entries[at].logprob - near.get(mine, -np.inf)
            if gap <= max(TIE[self.dtype], TIE.get(caps.logits_dtype, 0.0)):
                self.excused += 1
                return
            raise Failed(
                f"request {name}: token {at} is {mine}, the portable ops give {theirs} "
                f"({'far from likely' if gap > 100 else f'likelier by {gap:.2g}'})"
            )
        demand(len(got) == len(wanted), f"request {name}: {len(got)} tokens of {len(wanted)}")

    def finding(self, detail: str = "") -> Finding:
        excused = f"{self.excused} near ties went the other way" if self.excused else ""
        return Finding(detail="; ".join(t for t in (detail, excused) if t))


@contextmanager
def trial(
    subject: Subject, dice: Dice, model: str, numbers: tuple[str, str], **settings: Any
) -> Iterator[Trial]:
    """A model in a folder that goes with the case. `settings`: as `tiny.write` takes them."""
    size = tiny.head_size(subject.capabilities, bool(tiny.MODELS[model].get("odd")))
    with tempfile.TemporaryDirectory(prefix="octavo-conformance-") as folder:
        tiny.write(Path(folder), model, size, dice, layers=subject.size(3, 2), **settings)
        sizes = [s for s in subject.capabilities.block_sizes if s <= 256][: subject.size(3, 1)]
        sizes = sizes or [subject.capabilities.block_sizes[0]]
        # One size for all scenarios of a model where each is a set of programs: they are compiled once.
        number = subject.static(list(tiny.MODELS).index(model) % len(sizes), None)
        block = int(dice.choice(sizes) if number is None else sizes[number])
        yield Trial(subject, Path(folder), *numbers, block)


def plainest(subject: Subject) -> tuple[str, str]:
    """The numbers in which tokens can be compared best: float32 if there is any."""
    caps = subject.capabilities
    dtype = next(
        (d for d in ("float32", "float16", "bfloat16") if d in caps.dtypes), caps.dtypes[0]
    )
    return subject.beside(dtype)


# --------------------------------------------------------------------------------------- scenarios


def chunks(t: Trial, dice: Dice) -> str:
    """Prompts in chunks beside decoding neighbours, some with log-probabilities of every position."""
    longest, most = t.subject.size(90, 40), t.subject.size(12, 6)
    requests = [
        ask(f"r{i}", tiny.prompt(dice, int(dice.integers(1, longest))), int(dice.integers(3, most)))
        for i in range(t.subject.size(6, 3))
    ]
    with t.engine(max_num_batched_tokens=32) as made:
        found = Run().go(made, requests).tokens
    t.compare(requests, found)
    return ""


def tight_pool(t: Trial, dice: Dice) -> str:
    """More sequences than the pool holds: some are preempted and computed again."""
    size, count = t.block_size, t.subject.size(5, 3)
    requests = [ask(f"r{i}", tiny.prompt(dice, size - 3 + i % 2), 8) for i in range(count)]
    with t.engine(
        num_kv_blocks=count + 1, max_model_len=2 * size, enable_prefix_caching=False
    ) as made:
        found = Run().go(made, requests).tokens
        preempted = made.stats().preemptions
    demand(preempted > 0, "no sequence was preempted, though the pool holds too few blocks for all")
    t.compare(requests, found)
    return f"{preempted} preemptions"


def swaps(t: Trial, dice: Dice) -> str:
    """Blocks of preempted sequences wait on the host; evicted ones are found there again."""
    if not t.subject.capabilities.swap:
        raise NotOffered("swap is not declared")
    size, count, host = t.block_size, t.subject.size(5, 3), {"swap_space": 0.0625}
    requests = [ask(f"r{i}", tiny.prompt(dice, size - 3 + i % 2), 8) for i in range(count)]
    tight = {"num_kv_blocks": count + 1, "max_model_len": 2 * size}
    with t.engine(**tight, **host, enable_prefix_caching=False, preemption_mode="swap") as made:
        found = Run().go(made, requests).tokens
        stats = made.stats()
    demand(
        stats.swaps == stats.preemptions > 0,
        f"{stats.swaps} of {stats.preemptions} preempted sequences kept their blocks on the host",
    )
    t.compare(requests, found)
    first, second = (tiny.prompt(dice, 2 * size + 3) for _ in range(2))
    turns = [ask(f"t{i}", [first, second][i % 2], 4) for i in range(3)]
    run = Run()
    with t.engine(num_kv_blocks=5, max_model_len=3 * size, **host, preemption_mode="swap") as made:
        for request in turns:
            run.go(made, [request])
        hits = made.stats().host_hit_tokens
        caching = made.scheduler.blocks.prefix_caching
    demand(
        hits > 0 or not caching,
        "no prompt token came from a block that had been evicted to the host",
    )
    t.compare(turns, run.tokens)
    return f"{stats.swaps} swaps, {hits} prompt tokens from blocks on the host"


def prefixes(t: Trial, dice: Dice) -> str:
    """Prompts that begin alike share the blocks of their beginning."""
    common = tiny.prompt(dice, 2 * t.block_size + 3)
    requests = [
        ask(f"r{i}", common[: len(common) - i] + tiny.prompt(dice, 2 + i), 6)
        for i in range(t.subject.size(4, 3))
    ]
    with t.engine() as made:
        run = Run().go(made, requests[:1])
        run.go(made, requests[1:])
        hits = made.stats().prefix_hit_tokens
        caching = made.scheduler.blocks.prefix_caching
    if not caching:
        raise NotOffered("prompts are computed whole, so none begins with cached blocks")
    demand(hits > 0, "no prompt token came from the prefix cache")
    t.compare(requests, run.tokens)
    return f"{hits} prompt tokens from the prefix cache"


def forks(t: Trial, dice: Dice) -> str:
    """Several samples of a prompt share its blocks; who writes into a shared one gets a copy."""
    count = t.subject.size(t.block_size // 2 + 4, 5)
    requests = [
        ask(f"r{i}", tiny.prompt(dice, t.block_size + 3 + 2 * i), count, n=3 - i) for i in range(2)
    ]
    with t.engine() as made:
        found = Run().go(made, requests).tokens
    demand(len(found) == 5, f"{len(found)} samples of 5 came back")
    t.compare(requests, found)
    return ""


def aborts(t: Trial, dice: Dice) -> str:
    """Requests that are taken back leave the others alone, and their blocks free."""
    count, each = t.subject.size(5, 4), t.subject.size(11, 5)
    requests = [ask(f"r{i}", tiny.prompt(dice, 9 + each * i), 12) for i in range(count)]
    run = Run()
    with t.engine(max_num_batched_tokens=48) as made:

        def abort(step: int) -> None:
            if step in (2, 5):
                run.take(made.abort([f"r{step // 2}"]))

        run.go(made, requests, abort)
    kept = [r for r in requests if r.id not in ("r1", "r2")]
    t.compare(
        kept, {key: tokens for key, tokens in run.tokens.items() if key[0] not in ("r1", "r2")}
    )
    return ""


def seeds(t: Trial, dice: Dice) -> str:
    """A seeded request draws the same tokens alone and in company."""
    if not t.subject.capabilities.seeded_sampling:
        raise NotOffered("seeded_sampling is not declared")
    prompt = tiny.prompt(dice, 19)
    seeded = ask("s", prompt, 10, temperature=0.7, top_p=0.95, seed=int(dice.integers(1 << 40)))
    company = [ask(f"r{i}", tiny.prompt(dice, 5 + 9 * i), 8, temperature=1.0) for i in range(4)]
    with t.engine(max_num_batched_tokens=32, enable_prefix_caching=False) as made:
        alone = Run().go(made, [seeded]).tokens["s", 0]
        beside = Run().go(made, [*company, seeded]).tokens["s", 0]
    same = alone == beside
    if not same and t.dtype == "float32":
        raise Failed(f"one seed gave {alone} alone and {beside} in company")
    return "" if same else "rounding moved a draw between batches"


SCENARIOS: dict[str, Callable[[Trial, Dice], str]] = {
    "chunked-prefill": chunks,
    "preemption": tight_pool,
    "swap": swaps,
    "prefix-hits": prefixes,
    "forks": forks,
    "aborts": aborts,
    "seeds": seeds,
}


def through(subject: Subject, dice: Dice, model: str, scenario: str, dtype: str) -> Finding:
    """One scenario of one model."""
    numbers = subject.beside(dtype) if dtype else plainest(subject)
    with trial(subject, dice, model, numbers) as t:
        try:
            return t.finding(SCENARIOS[scenario](t, dice))
        except RequestRefused as refused:  # a device's lanes may be too small for it
            raise Refused(str(refused)) from refused


# ---------------------------------------------------------------------- what is declared, and not


def declared(
    subject: Subject, dice: Dice, dtype: str, kv_dtype: str, scheme: str | None
) -> Finding:
    """The next token's log-probabilities in these numbers, near those of the portable ops in the same."""
    requests = [
        ask(f"r{i}", tiny.prompt(dice, 1 + 5 * i), 1, logprobs=tiny.VOCAB)
        for i in range(subject.size(12, 5))
    ]
    floats = ("float32", "float16", "bfloat16")
    with trial(subject, dice, "grouped-heads", (dtype, kv_dtype)) as t:
        with t.engine(quantization=scheme, max_num_batched_tokens=48) as made:
            mine = _logprobs(Run().go(made, requests))
        options = t.options(
            quantization=scheme, block_size=16, kv_cache_dtype=kv_dtype if kv_dtype in floats else dtype
        )  # fmt: skip
        with engine(Portable(), "portable", t.folder, **options) as made:
            theirs = _logprobs(Run().go(made, requests))
    logits = subject.capabilities.logits_dtype
    words = [w for w in (dtype, kv_dtype, scheme, logits) if w]
    bound = max(LOGPROB_TOLERANCE.get(w, LOGPROB_TOLERANCE["int8"]) for w in words)
    return within("log-probabilities of tokens", float(np.abs(mine - theirs).mean()), bound)


def _logprobs(run: Run) -> Any:
    """[requests, vocabulary], by the request's name."""
    found = {}
    for update in run.updates:
        for entry in update.logprobs or ():
            row = np.full(tiny.VOCAB, -np.inf)
            row[entry.top_ids] = entry.top_logprobs
            found[update.request_id] = row
    return np.stack([found[name] for name in sorted(found)])


def refuses(subject: Subject, dice: Dice, what: str) -> Finding:
    """What is not declared is refused when the engine is built, in words that name it."""
    caps = subject.capabilities
    from octavo.core.config import DTYPES, KV_DTYPES
    from octavo.core.quantization import SCHEMES

    dtype, kv_dtype = plainest(subject)
    kv_dtypes = (kv_dtype,) if caps.kv_equals_dtype else caps.kv_dtypes
    sizes = [s for s in (1, 7, 16, 24, 48, 100, 128, 1000) if s not in caps.block_sizes]
    asked: dict[str, list[Any]] = {
        "dtype": [d for d in DTYPES[1:] if d not in caps.dtypes],
        "kv_cache_dtype": [d for d in KV_DTYPES[1:] if d not in kv_dtypes],
        "block_size": sizes[-1:],
        "quantization": [s for s in SCHEMES if s not in caps.quantization],
        "batch_invariant": [True] * (not caps.batch_invariant),
        "swap_space": [1] * (not caps.swap),
        "head_size": [s for s in (7, 24, 64, 2048) if caps.refuses_head_size(s)][:1],
    }
    if not asked[what]:
        raise NotOffered(f"nothing is left out: every {what.replace('_', ' ')} is declared")
    for value in asked[what]:
        options = {"dtype": dtype, "kv_cache_dtype": kv_dtype, "num_kv_blocks": 16}
        size = tiny.head_size(caps, False)
        if what == "head_size":
            size = value
        else:
            options[what] = value
        with tempfile.TemporaryDirectory(prefix="octavo-conformance-") as folder:
            tiny.write(Path(folder), "grouped-heads", size, dice)
            try:
                with engine(subject.backend, subject.device, Path(folder), **options):
                    pass
            except (ConfigError, ModelError) as refused:
                words = str(refused).replace("-", "_")
                named = what if what in ("batch_invariant", "swap_space") else str(value)
                demand(named in words, f"{what} {value} is refused without naming it: {refused}")
                continue
        raise Failed(f"{what} {value} is not declared, yet an engine was built with it")
    return Finding(detail=f"refused: {what} " + ", ".join(map(str, asked[what])))


def cases(subject: Subject, full: bool) -> list[Case]:
    """All cases of this file."""
    made: list[Case] = []

    def add(op: str, dtype: str, aspect: str, body: Callable[..., Finding], *given: Any) -> None:
        number = sum((c.op, c.dtype, c.aspect) == (op, dtype, aspect) for c in made)
        group: Any = "contract" if op == "refusal" else "engine"
        made.append(Case(group, op, dtype, aspect, number, lambda s, d: body(s, d, *given)))

    for what in (
        "dtype",
        "kv_cache_dtype",
        "block_size",
        "quantization",
        "batch_invariant",
        "swap_space",
        "head_size",
    ):
        add("refusal", "", what, refuses, what)
    dtype = plainest(subject)[0]
    for i, model in enumerate(tiny.MODELS):
        for j, scenario in enumerate(SCENARIOS):
            # Each model and each scenario twice or thrice; with --full each with each.
            for _ in range(
                2 if full else 1 if (i + j) % 3 == 0 or (not i and not subject.brief) else 0
            ):
                add(scenario, dtype, model, through, model, scenario, "")
    for other in [d for d in subject.dtypes if d != dtype]:
        add(
            "chunked-prefill",
            other,
            "grouped-heads",
            through,
            "grouped-heads",
            "chunked-prefill",
            other,
        )
    for one, kv_dtype in subject.numbers():
        name = one if kv_dtype == one else f"{one},kv={kv_dtype}"
        add("numbers", name, "", declared, one, kv_dtype, None)
    for scheme in subject.capabilities.quantization:
        add("numbers", f"{scheme}-over-{dtype}", "", declared, *plainest(subject), scheme)
    return made
