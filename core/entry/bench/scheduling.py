"""What planning costs: the engine's own scheduler and batch builder around a runner that computes nothing.

No torch is imported. Each case holds the number of running and of waiting requests constant, so that
the two can be told apart.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.core.admission import SchedulerLimits
from octavo.core.batch import BatchBuilder
from octavo.core.blocks import BlockManager
from octavo.core.contract import Lane
from octavo.core.entry.bench.machine import describe
from octavo.core.entry.bench.stats import columns, summary
from octavo.core.params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.types import Request, StepResult

_FORMAT = 1  # counts changes of the JSON's meaning
_BLOCK = 16
_SHARED = 1024  # tokens that all prompts of "turnover" begin with
_OWN = 32
_WARM_UP = 40  # steps
PARTS = ("schedule", "build batch", "commit")

CASES = {
    "decode": "every place is taken, and all decode",
    "memory": "places are free, but the first of the queue finds no room in the KV cache",
    "turnover": "prompts of 1,024 shared and 32 own tokens, 8 to 56 output tokens: when one ends, "
    "the next starts",
}

NOTE = """\
Microseconds of one step, median over the steps; p99 is of the sum. schedule: who runs; build batch:
arrays for the device; commit: taking the tokens, hashing full blocks, freeing. """ + "\n".join(
    f"{name}: {text}." for name, text in CASES.items()
)


@dataclass(frozen=True)
class Measure:
    """One case: seconds of each part of each step, in the order of `PARTS`."""

    case: str
    running: int
    waiting: int
    seconds: tuple[tuple[float, float, float], ...]

    def of(self, part: str) -> dict[str, float]:
        """Mean and percentiles of a part, or of the "sum" of all, in seconds."""
        if part == "sum":
            return summary([sum(step) for step in self.seconds])
        return summary([step[PARTS.index(part)] for step in self.seconds])


class _Load:
    """A scheduler with a constant number of requests in it."""

    def __init__(self, case: str, running: int, waiting: int, steps: int) -> None:
        self._turnover = case == "turnover"
        self._dice = random.Random(running)
        self._shared = self._tokens(_SHARED)
        self._output = 2 * (steps + _WARM_UP)  # tokens, where none is to end
        per_sequence = -(-(_SHARED + _OWN + self._output) // _BLOCK) + 1
        self.blocks = BlockManager(4 * running * per_sequence + 200, _BLOCK)
        places = 2 * running if case == "memory" else running
        self.limits = SchedulerLimits(
            max_num_seqs=places,
            max_num_batched_tokens=2048,
            max_model_len=4096,
            max_logits_rows=places + 1,
        )
        self.scheduler = Scheduler(self.blocks, self.limits)
        self._count = 0
        self._scarce = False
        self._ballast: list[int] = []
        self._add(running)
        if case == "memory":
            # Run until all decode, then leave the pool too little for one more prompt.
            while not self.scheduler.running or not all(s.decoding for s in self.scheduler.running):
                self.step()
        self._scarce = case == "memory"
        self._add(waiting)

    def _fill_pool(self) -> None:
        """Leaves each running sequence a block to grow into, and one."""
        surplus = self.blocks.num_free - len(self.scheduler.running) - 1
        if surplus > 0:
            self._ballast += self.blocks.allocate(surplus)
        elif surplus < 0:
            self.blocks.free(self._ballast[surplus:])
            del self._ballast[surplus:]

    def _tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(32_000) for _ in range(count)]

    def _add(self, count: int) -> None:
        for _ in range(count):
            self._count += 1
            # Of different lengths, so that not all reach the end of a block in the same step.
            prompt = self._shared if self._turnover else self._tokens(self._dice.randint(64, 192))
            output = self._dice.randint(8, 56) if self._turnover else self._output
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            self.scheduler.add(
                Request(
                    id=str(self._count),
                    prompt_token_ids=[*prompt, *self._tokens(_OWN)],
                    params=params,
                )
            )

    def step(self, builder: BatchBuilder | None = None) -> tuple[float, float, float]:
        """Seconds of each part."""
        if self._scarce:
            self._fill_pool()
        begun = time.perf_counter()
        plan = self.scheduler.schedule()
        assert plan is not None
        planned = time.perf_counter()
        if builder is not None:
            builder.build(plan)
        built = time.perf_counter()
        drawn = sum(item.samples for item in plan.items)
        result = StepResult(np.full(drawn, self.scheduler.roster.steps % 1000, np.int64))
        ran = time.perf_counter()
        updates = self.scheduler.commit(plan, result)
        done = time.perf_counter()
        self._add(sum(update.finish_reason is not None for update in updates))
        return planned - begun, built - planned, done - ran


def measure(
    cases: Sequence[str],
    running: Sequence[int],
    waiting: Sequence[int],
    steps: int,
    on_case: Callable[[], None] = lambda: None,
) -> list[Measure]:
    """Every combination, one after the other.

    Args:
        steps: steps that are timed, after a warm-up.
        on_case: called after each combination.
    """
    found = []
    for case in cases:
        for runs in running:
            for waits in waiting:
                load = _Load(case, runs, waits, steps)
                builder = BatchBuilder(Lane(), _BLOCK)
                for _ in range(_WARM_UP):
                    load.step(builder)
                gc.collect()
                gc.freeze()  # as the engine process does once it is up
                seconds = tuple(load.step(builder) for _ in range(steps))
                gc.unfreeze()
                found.append(Measure(case, runs, waits, seconds))
                on_case()
    return found


def table(found: Sequence[Measure]) -> str:
    """Rows of microseconds, and what they mean."""
    rows: list[tuple[str, ...]] = [("case", "running", "waiting", *PARTS, "sum", "p99")]
    for one in found:
        times = (one.of(part)["p50"] for part in (*PARTS, "sum"))
        rows.append(
            (
                one.case,
                str(one.running),
                str(one.waiting),
                *(f"{1e6 * seconds:.0f}" for seconds in (*times, one.of("sum")["p99"])),
            )
        )
    return f"{columns(rows)}\n\n{NOTE}"


def record(found: Sequence[Measure], steps: int, warning: str | None) -> dict[str, Any]:
    """Everything measured, for JSON; times in seconds."""
    return {
        "format": _FORMAT,
        "steps": steps,
        "measures": [
            {
                "case": one.case,
                "running": one.running,
                "waiting": one.waiting,
                **{part.replace(" ", "_"): one.of(part) for part in (*PARTS, "sum")},
                "seconds": dataclasses.asdict(one)["seconds"],
            }
            for one in found
        ],
        "machine": describe(),
        "disturbed": warning,
    }
