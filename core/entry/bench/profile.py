"""Where a step's time goes: timers around the parts of the engine, put on for one run, and the kernels'
own counters where the backend has instruments.

On a device that works asynchronously a part that only starts work looks cheap, and the one that waits
for it dear; on the CPU each part pays for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from octavo.core import guesses, logit_changes, sampler
from octavo.core.engine import Engine
from octavo.core.instruments import Instruments
from octavo.core.runner import Runner

HOST_PARTS = ("schedule", "build batch", "sample", "commit", "detokenise")
"""The engine's own work, as opposed to the model's: the share of it is what is bounded."""
PARTS = ("schedule", "build batch", "prepare", "forward", "sample", "commit", "detokenise")
HOST_TARGET, SAMPLE_TARGET = 0.10, 0.05


@dataclass
class StepTimes:
    """One step: its size and the seconds of each part; of those, what the kernels' counters tell apart, and
    what changing logits took (grammars and masks of structured output, biases, penalties)."""

    sequences: int
    tokens: int
    seconds: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass
class Profile:
    """The steps of a run, in order."""

    steps: list[StepTimes] = field(default_factory=list)

    def add(self, part: str, seconds: float) -> None:
        if self.steps:
            spent = self.steps[-1].seconds
            spent[part] = spent.get(part, 0.0) + seconds

    def full_steps(self) -> list[StepTimes]:
        """The decode steps with as many sequences as any step had."""
        most = max((s.sequences for s in self.steps), default=0)
        full = [s for s in self.steps if s.sequences == most]
        return [s for s in full if s.tokens == most] or full


def shares(steps: list[StepTimes]) -> dict[str, float]:
    """Each part's share of these steps' time; "host" is HOST_PARTS together."""
    total = sum(step.total for step in steps) or 1.0
    found = {part: sum(s.seconds.get(part, 0.0) for s in steps) / total for part in PARTS}
    found["host"] = sum(found[part] for part in HOST_PARTS)
    return found


def kernel_shares(steps: list[StepTimes]) -> dict[str, float]:
    """Each kernel phase's share of these steps' time; empty without instruments."""
    total = sum(step.total for step in steps) or 1.0
    names = dict.fromkeys(name for step in steps for name in step.kernels)
    return {name: sum(s.kernels.get(name, 0.0) for s in steps) / total for name in names}


@contextmanager
def profiled(engine: Engine, outputs: Any, profile: Profile) -> Iterator[None]:
    """Times every step of `engine` and `outputs.process` into `profile` while it is open.

    A runner that is not `core.runner.Runner` is timed as a whole, under "forward".
    """

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                profile.add(part, time.perf_counter() - started)

        return call

    schedule = engine.scheduler.schedule

    def opened() -> Any:
        started = time.perf_counter()
        plan = schedule()
        if plan is not None:
            profile.steps.append(StepTimes(len(plan.items), plan.num_tokens))
            profile.add("schedule", time.perf_counter() - started)
        return plan

    runner: Any = engine._runner

    def within(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Timed as a part of another part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = profile.steps[-1].kernels
                spent[part] = spent.get(part, 0.0) + time.perf_counter() - started

        return call

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (engine.scheduler, "schedule", opened),
        (engine.scheduler, "commit", timed("commit", engine.scheduler.commit)),
        (outputs, "process", timed("detokenise", outputs.process)),
    ]
    if isinstance(runner, Runner):
        replaced += [
            (runner, "_build", timed("build batch", runner._build)),
            (runner._backend, "prepare", timed("prepare", runner._backend.prepare)),
            (runner, "_forward", timed("forward", runner._forward)),
            (runner._sampler, "run", timed("sample", runner._sampler.run)),
            (sampler, "change_logits", within("changing logits", logit_changes.change_logits)),
            (sampler, "settle", within("changing logits", guesses.settle)),
            (runner._sampler, "_guesses", within("changing logits", runner._sampler._guesses)),
        ]
    else:
        replaced.append((runner, "execute", timed("forward", runner.execute)))
    with ExitStack() as undo:
        if isinstance(runner, Runner):
            instruments = runner._backend.instruments(runner._device)
            if instruments is not None:
                undo.callback(instruments.stop_phases)
                replaced.append(
                    (runner, "execute", _counting(runner.execute, instruments, profile))
                )
        for owner, name, function in replaced:
            undo.callback(_restore, owner, name, vars(owner).get(name, _ABSENT))
            setattr(owner, name, function)
        yield


def _counting(
    execute: Callable[..., Any], instruments: Instruments, profile: Profile
) -> Callable[..., Any]:
    """`execute` that keeps what the kernels counted during it."""

    def call(step: Any) -> Any:
        instruments.start_phases()
        try:
            return execute(step)
        finally:
            profile.steps[-1].kernels.update(instruments.read_phases())

    return call


_ABSENT = object()


def _restore(owner: Any, name: str, before: Any) -> None:
    """Undoes a setattr; what a class defines shows again when the instance's own is gone."""
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
