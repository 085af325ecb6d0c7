"""Runs a workload through the engine, everything submitted at once, and counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from octavo.core.config import ConfigError
from octavo.core.engine import Engine
from octavo.core.entry.bench.machine import Load, LoadMeter, peak_rss_bytes
from octavo.core.entry.bench.profile import Profile, profiled
from octavo.core.entry.bench.workload import Item, Workload
from octavo.core.loading.tokenizer import Tokenizer
from octavo.core.output import OutputProcessor
from octavo.core.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from octavo.core.types import Request, RequestOutput, Timings

OnTokens = Callable[[int], None]


@dataclass(frozen=True)
class Throughput:
    """What a run brought. Seconds are wall time from the first submission to the last output.

    `host_seconds` and `runner_seconds` are the engine's own split of its steps: scheduling and
    bookkeeping, and everything from building the batch to the sampled tokens.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    host_seconds: float
    runner_seconds: float
    steps: int
    preemptions: int
    cached_tokens: int
    peak_rss_bytes: int | None
    load: Load | None
    timings: list[Timings]
    tokens: list[list[int]] = field(repr=False)

    @property
    def output_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_per_second(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def output_side_seconds(self) -> float:
        """Outside the engine: detokenising, and this loop."""
        return self.seconds - self.host_seconds - self.runner_seconds


class Bench:
    """One loaded engine, ready to be measured."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.outputs = OutputProcessor(tokenizer)
        self._count = 0

    def check(self, workload: Workload) -> None:
        """Raises ConfigError when a request of the workload cannot run here."""
        limit = self.engine.info.max_model_len
        if workload.longest > limit:
            raise ConfigError(
                f"workload {workload.name} has a request of {workload.longest} tokens, the engine "
                f"takes {limit}: raise --max-model-len or give the KV cache more memory"
            )

    def run(
        self,
        items: Iterable[Item],
        on_tokens: OnTokens | None = None,
        profile: Profile | None = None,
    ) -> Throughput:
        """Submits all items, runs them to their end with text made of every token, and counts.

        Args:
            on_tokens: told the number of output tokens after every step that brought some.
            profile: filled with the time of each part of a step.

        Raises:
            RuntimeError: a request did not bring as many tokens as it was asked for.
        """
        requests = [self._request(item) for item in items]
        before, engine = self.engine.stats(), self.engine
        host, runner = engine.host_seconds, engine.runner_seconds
        watch: AbstractContextManager[Any] = nullcontext()
        if profile is not None:
            watch = profiled(engine, self.outputs, profile)
        done: dict[str, RequestOutput] = {}
        meter = LoadMeter()
        with watch:
            started = time.perf_counter()
            for request in requests:
                engine.add(request)
                self.outputs.add(request.id, None, request.prompt_token_ids, request.params)
            self._drive(done, on_tokens)
            seconds = time.perf_counter() - started
        load = meter.read()
        after = engine.stats()
        results = [done[request.id] for request in requests]
        for request, result in zip(requests, results, strict=True):
            _check(request, result)
        return Throughput(
            requests=len(requests),
            prompt_tokens=sum(len(r.prompt_token_ids) for r in requests),
            output_tokens=sum(len(r.outputs[0].token_ids) for r in results),
            seconds=seconds,
            host_seconds=engine.host_seconds - host,
            runner_seconds=engine.runner_seconds - runner,
            steps=after.steps - before.steps,
            preemptions=after.preemptions - before.preemptions,
            cached_tokens=after.prefix_hit_tokens - before.prefix_hit_tokens,
            peak_rss_bytes=peak_rss_bytes(),
            load=load,
            timings=[r.metrics for r in results if r.metrics is not None],
            tokens=[list(r.outputs[0].token_ids) for r in results],
        )

    def _drive(self, done: dict[str, RequestOutput], on_tokens: OnTokens | None) -> None:
        engine, outputs = self.engine, self.outputs
        while engine.has_unfinished():
            updates = engine.step()
            finished, _ = outputs.process(updates)
            done.update(finished)
            if on_tokens is not None and updates:
                on_tokens(sum(len(update.token_ids) for update in updates))

    def _request(self, item: Item) -> Request:
        self._count += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=item.output_len,
            ignore_eos=item.schema is None,  # within a schema the grammar allows no end yet
            structured_outputs=(
                None if item.schema is None else StructuredOutputsParams(json=item.schema)
            ),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return Request(
            id=f"bench-{self._count}",
            prompt_token_ids=item.prompt_token_ids,
            params=params,
            eos_token_ids=self.engine.info.eos_token_ids,
            arrival_time=time.time(),
        )


def _check(request: Request, result: RequestOutput) -> None:
    [output] = result.outputs
    if output.finish_reason != "length" or len(output.token_ids) != request.params.max_tokens:
        raise RuntimeError(
            f"{request.id} brought {len(output.token_ids)} of {request.params.max_tokens} tokens and "
            f"ended with {output.finish_reason!r} ({output.stop_reason}): nothing was measured"
        )
