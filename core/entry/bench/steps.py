"""Steps of a chosen shape through a real engine, timed one by one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.engine import Engine
from octavo.core.entry.bench.counting import PHASES, Chunk
from octavo.core.instruments import Instruments
from octavo.core.params import SamplingParams
from octavo.core.types import Request

# Threads with rows of their own wait for each other at a step's end: that was mostly products' time.
_OWN = {
    "linear": "linear",
    "attention": "attention",
    "sampling": "sampling",
    "waiting": "linear",
}
_WARM = 2  # decode steps at full width that are run before those that count


@dataclass
class Step:
    """One step: what it did of each sequence, its wall time, and the seconds of each of `PHASES`.

    Without instruments `phases` is empty. What no kernel counts is the host's.
    """

    chunks: list[Chunk]
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)


def median_step(steps: list[Step]) -> Step:
    """The one whose time is in the middle: its phases add up, which medians of phases do not."""
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def sized(config: EngineConfig, sequences: int, tokens: int) -> EngineConfig:
    """The configuration with room for so many sequences of so many tokens each, no prefix shared."""
    block = config.block_size or 16
    values: dict[str, Any] = {"max_num_seqs": max(sequences, config.max_num_seqs)}
    if (config.num_kv_blocks, config.kv_memory, config.kv_fraction) == (None, None, None):
        # A block more for each: a request is admitted only if every running one can still grow.
        values["num_kv_blocks"] = 2 + sequences * (2 + -(-tokens // block))
    return config.with_values(**values)


class Steps:
    """Drives an engine that nobody else uses."""

    def __init__(self, engine: Engine, instruments: Instruments | None) -> None:
        self._engine, self._instruments = engine, instruments
        self._count = 0

    def prefill(self, tokens: int, repeats: int) -> list[Step]:
        """Steps that take in a whole prompt of `tokens` each, after one that does not count.

        Raises:
            ConfigError: the engine takes fewer tokens in a step, or in a sequence.
        """
        most = self._engine.info.max_num_batched_tokens
        if tokens > most:
            raise ConfigError(
                f"a prompt of {tokens} tokens in one step: the engine takes {most}; "
                f"use --max-num-batched-tokens {tokens}"
            )
        self._check(tokens + 1)
        found = []
        with self._plans() as plans:
            for _ in range(1 + repeats):
                self._add(tokens, 1)
                found.append(self._timed(plans))
        return found[1:]

    def decode(
        self, sequences: int, context: int, repeats: int, *, same: bool = False
    ) -> list[Step]:
        """Steps in which each of `sequences` draws a token, at about `context` tokens each.

        Args:
            same: prompts begin as those of the last call with `same`, so that a prefix cache can help.

        Raises:
            ConfigError: the engine cannot hold such sequences.
            RuntimeError: they never all ran at once.
        """
        engine = self._engine
        batch = engine.info.max_num_batched_tokens
        before = _WARM + repeats // 2
        self._check(context + self.beyond(repeats))
        for i in range(sequences):
            # Those that come first decode while the others are still taken in.
            ahead = (sequences - 1 - i) * context // batch
            prompt = max(1, context - before - ahead)
            room = engine.info.max_model_len - prompt
            room = min(room, 2 * (ahead + repeats + _WARM) + 64)
            self._add(prompt, room, f"same {i}" if same else None)
        found: list[Step] = []
        try:
            with self._plans() as plans:
                while len(found) < _WARM + repeats:
                    if not engine.has_unfinished():
                        raise RuntimeError(
                            f"{sequences} sequences of {context} tokens never ran at once: give "
                            "the KV cache more memory"
                        )
                    step = self._timed(plans)
                    if len(step.chunks) == sequences and all(c.new == 1 for c in step.chunks):
                        found.append(step)
        finally:
            engine.abort([sequence.request.id for sequence in list(engine.scheduler.sequences())])
        return found[_WARM:]

    @staticmethod
    def beyond(repeats: int) -> int:
        """Tokens that sequences may have more than their context."""
        return repeats + _WARM + 2

    def _check(self, tokens: int) -> None:
        limit = self._engine.info.max_model_len
        if tokens > limit:
            raise ConfigError(
                f"a sequence of {tokens} tokens: the engine takes {limit}; ask for less"
            )

    def _add(self, prompt: int, output: int, seed: str | None = None) -> None:
        self._count += 1
        dice, vocabulary = random.Random(seed or self._count), self._engine.info.vocab_size
        ids = [dice.randrange(vocabulary) for _ in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self._engine.add(
            Request(id=f"step-{self._count}", prompt_token_ids=ids, params=params, eos_token_ids=())
        )

    def _timed(self, plans: list[Any]) -> Step:
        instruments = self._instruments
        if instruments is not None:
            instruments.start_phases()
        started = time.perf_counter()
        self._engine.step()
        seconds = time.perf_counter() - started
        chunks = [Chunk(item.count, item.start + item.count) for item in plans.pop().items]
        step = Step(chunks, seconds)
        if instruments is not None:
            step.phases = by_phase(instruments.read_phases(), seconds)
            instruments.stop_phases()
        return step

    @contextmanager
    def _plans(self) -> Iterator[list[Any]]:
        """The plans of the steps meanwhile, the last one last."""
        scheduler: Any = self._engine.scheduler
        schedule = scheduler.schedule
        plans: list[Any] = []

        def watched() -> Any:
            plan = schedule()
            if plan is not None:
                plans.append(plan)
            return plan

        scheduler.schedule = watched
        try:
            yield plans
        finally:
            del scheduler.schedule


def by_phase(kernels: dict[str, float], seconds: float) -> dict[str, float]:
    """A step's wall time over `PHASES`, out of what its kernels counted."""
    found = dict.fromkeys(PHASES, 0.0)
    for name, spent in kernels.items():
        found[_OWN.get(name, "elementwise")] += spent
    found["host"] = seconds - sum(kernels.values())
    return found
