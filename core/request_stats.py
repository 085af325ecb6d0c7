"""What has come and gone since the start, counted by request: numbers and histograms, no names.

Everything is measured where outputs are made, beside the engine: what a caller sees. One thread
writes and reads, so nothing is locked, and an observation costs a bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.core.params import SamplingParams
from octavo.core.types import FinishReason, Timings

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Bucket bounds of times that a request takes: vLLM's of the time to the first token."""
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Bucket bounds of times between tokens."""
NUMBERS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""Bucket bounds of token counts."""
SAMPLES = (1, 2, 5, 10, 20)

# A request of several samples ends for the worst of their reasons.
_WORST_FIRST: tuple[FinishReason, ...] = ("error", "abort", "length", "stop")


class Histogram:
    """Counts of values up to each bound, as Prometheus has them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, as often as told."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self.counts)


def no_reasons() -> dict[FinishReason, int]:
    """A count for each finish reason."""
    return {"stop": 0, "length": 0, "abort": 0, "error": 0}


def worst(reasons: Iterable[FinishReason]) -> FinishReason:
    """What a request ended for, out of what its samples ended for."""
    found = set(reasons)
    return next(reason for reason in _WORST_FIRST if reason in found)


@dataclass(slots=True)
class RequestStats:
    """Requests, samples and tokens since the start.

    Whatever happened to them, `received` is the sum of `finished` and of the requests open, and the
    same holds for samples. `prompt_tokens` counts a prompt when its first output comes,
    `generation_tokens` what callers were given: nothing behind a stop string, nothing after they left.
    """

    received: int = 0
    finished: dict[FinishReason, int] = field(default_factory=no_reasons)
    samples_started: int = 0
    samples_finished: dict[FinishReason, int] = field(default_factory=no_reasons)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    embeddings: int = 0
    recomputed_tokens: int = 0

    # Every request that came so far.
    first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    # Those that ran to their end.
    whole: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    inference: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    prefill: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    decode: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    token: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(NUMBERS))
    output_lengths: Histogram = field(default_factory=lambda: Histogram(NUMBERS))
    # What was asked for.
    asked_n: Histogram = field(default_factory=lambda: Histogram(SAMPLES))
    asked_tokens: Histogram = field(default_factory=lambda: Histogram(NUMBERS))

    def on_received(self, params: SamplingParams) -> None:
        """A request was handed to the engine."""
        self.received += 1
        self.samples_started += params.n
        self.asked_n.observe(params.n)
        if params.max_tokens is not None:
            self.asked_tokens.observe(params.max_tokens)

    def on_finished(
        self,
        reason: FinishReason,
        timings: Timings | None,
        seconds: float,
        prompt_tokens: int,
        output_tokens: list[int],
    ) -> None:
        """A request has ended; `output_tokens` by sample, `seconds` since it was received."""
        self.finished[reason] += 1
        if timings is None or reason not in ("stop", "length"):
            return
        self.recomputed_tokens += timings.num_recomputed_tokens
        self.whole.observe(seconds)
        self.queue.observe(timings.queue_time)
        self.prompt_lengths.observe(prompt_tokens)
        for count in output_tokens:
            self.output_lengths.observe(count)
        if not timings.first_token:  # max_tokens=0: the prompt was all
            return
        self.inference.observe(timings.inference_time)
        self.prefill.observe(timings.prefill_time)
        self.decode.observe(timings.decode_time)
        if (longest := max(output_tokens)) > 1:
            self.token.observe(timings.decode_time / (longest - 1))
