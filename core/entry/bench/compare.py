"""Octavo beside transformers' `generate()`: same weights, same token ids, same threads, same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.entry.bench.machine import Load, LoadMeter
from octavo.core.entry.bench.reference_model import greedy, load_transformers, margin_after
from octavo.core.entry.bench.workload import Item, Workload
from octavo.core.loading.files import ModelFiles

NUM_COMPARED = 16
TIE_MARGIN = 1e-3
"""Logits. Two float32 engines may round differently: below this either choice is right."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a request's tokens differ, and transformers' top-1 to top-2 margin
    there, in logits: near 0 it was a tie."""

    request: int
    step: int
    octavo: int
    transformers: int
    margin: float


@dataclass(frozen=True)
class Comparison:
    """transformers on the first requests of a workload, one at a time."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    equal: int
    differences: list[Difference]
    load: Load | None
    tokens: list[list[int]] = field(repr=False)

    @property
    def output_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_per_second(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first index at which two token lists differ; None when they are equal."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def compare(
    files: ModelFiles,
    device: str,
    workload: Workload,
    ours: Sequence[Sequence[int]],
    on_tokens: Callable[[int], None] | None = None,
    count: int = NUM_COMPARED,
) -> Comparison:
    """Runs the first `count` requests through `generate()` in float32 and compares tokens.

    Args:
        device: torch device that transformers runs on, the engine's own.
        ours: the engine's tokens for each request of the workload.
        on_tokens: told the number of output tokens after each request.
    """
    model = load_transformers(files, device)
    items = workload.items[:count]
    for item in workload.warm_up[:2]:
        greedy(model, item.prompt_token_ids, item.output_len)
    tokens: list[list[int]] = []
    meter = LoadMeter()
    started = time.perf_counter()
    for item in items:
        tokens.append(greedy(model, item.prompt_token_ids, item.output_len).tokens)
        if on_tokens is not None:
            on_tokens(item.output_len)
    seconds = time.perf_counter() - started
    load = meter.read()
    differences = _differences(model, items, ours, tokens)
    return Comparison(
        requests=len(items),
        prompt_tokens=sum(len(item.prompt_token_ids) for item in items),
        output_tokens=sum(map(len, tokens)),
        seconds=seconds,
        equal=len(items) - len(differences),
        differences=differences,
        load=load,
        tokens=tokens,
    )


def _differences(
    model: Any, items: Sequence[Item], ours: Sequence[Sequence[int]], theirs: list[list[int]]
) -> list[Difference]:
    found = []
    for i, item in enumerate(items):
        step = first_difference(ours[i], theirs[i])
        if step is not None:
            margin = margin_after(model, item.prompt_token_ids + theirs[i][:step])
            found.append(Difference(i, step, ours[i][step], theirs[i][step], margin))
    return found
