"""Requests on their way to a server: when each starts, and what came back when.

The clock of a request starts when it is sent (so a new connection counts), which is when it was due
unless `concurrency` holds it back; how long that was is kept apart.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.core.entry.bench.http_client import Client, TransferError

_KEPT_MESSAGES = 3


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        """Whether it brings output: the chunks that open and close an answer bring none."""
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning or delta.reasoning_content
        )


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Sample:
    """One request. Times are `time.perf_counter()` seconds; `chunks` are those of chunks with text.

    due: when it should have started. ready: when the limit of concurrency let it. sent: when it did. last: when the last chunk of the answer
    came. error: why it failed, else None.
    """

    due: float
    ready: float = 0.0
    sent: float = 0.0
    last: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    message: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first chunk with text (to the end of the answer if none had any)."""
        return (self.chunks[0] if self.chunks else self.last) - self.sent

    @property
    def e2e(self) -> float:
        """Seconds to the last chunk of the answer."""
        return self.last - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first; None when there is no second."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring chunks with text."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


@dataclass(frozen=True)
class Run:
    """What one load brought.

    seconds: from the first request sent to the last chunk received. lag: the most seconds that the
    client itself started a request late. client_cpu: CPU seconds of this process meanwhile.
    """

    samples: list[Sample]
    seconds: float
    lag: float
    client_cpu: float
    most_in_flight: int

    @property
    def good(self) -> list[Sample]:
        """Those that succeeded."""
        return [sample for sample in self.samples if sample.error is None]

    @property
    def errors(self) -> dict[str, int]:
        """kind of failure -> how many."""
        found: dict[str, int] = {}
        for sample in self.samples:
            if sample.error is not None:
                found[sample.error] = found.get(sample.error, 0) + 1
        return found

    @property
    def messages(self) -> list[str]:
        """The first few failures in full."""
        texts = [sample.message for sample in self.samples if sample.error is not None]
        return list(dict.fromkeys(texts))[:_KEPT_MESSAGES]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which requests arrive: a Poisson process, so gaps are exponential
    with mean 1 / rate. An infinite rate is a burst.

    The same seed gives the same arrivals at every rate but for their scale.
    """
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += -math.log(1.0 - draw.random()) / rate
    return times


async def run_load(
    client: Client,
    path: str,
    bodies: Sequence[bytes],
    starts: Sequence[float],
    *,
    concurrency: int | None = None,
    timeout: float = 600.0,
    on_done: Callable[[Sample], None] | None = None,
) -> Run:
    """Sends every body at its time and waits for all answers.

    Args:
        starts: seconds after now, rising, one for each body.
        concurrency: most requests under way at once; those beyond wait here, in their order.
        timeout: seconds until a request is given up.
    """
    places = asyncio.Semaphore(concurrency or len(bodies) or 1)
    begun = time.perf_counter()
    cpu = time.process_time()
    samples: list[Sample] = []
    tasks: list[asyncio.Task[None]] = []
    flying = most = 0
    free_since = begun

    async def one(sample: Sample, body: bytes) -> None:
        nonlocal flying, most
        try:
            await _send(client, path, body, sample, timeout)
        finally:
            flying -= 1
            places.release()
        if on_done is not None:
            on_done(sample)

    try:
        for start, body in zip(starts, bodies, strict=True):
            sample = Sample(due=begun + start)
            samples.append(sample)
            if (wait := sample.due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            full = places.locked()
            await places.acquire()
            if full:
                free_since = time.perf_counter()
            sample.ready = max(sample.due, free_since)
            flying += 1
            most = max(most, flying)
            tasks.append(asyncio.ensure_future(one(sample, body)))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    first = min((s.sent for s in samples), default=begun)
    last = max((s.last for s in samples), default=begun)
    lag = max((s.sent - s.ready for s in samples), default=0.0)
    return Run(samples, max(last - first, 1e-9), lag, time.process_time() - cpu, most)


async def _send(client: Client, path: str, body: bytes, sample: Sample, timeout: float) -> None:
    usage: _Usage | None = None
    failure: Any = None

    def on_event(now: float, data: bytes) -> None:
        nonlocal usage, failure
        if data == b"[DONE]":
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError as error:
            failure = failure or f"an event is not as expected: {error}"
            return
        usage = chunk.usage or usage
        failure = chunk.error or failure
        if chunk.choices:
            sample.last = now
            if any(choice.has_text for choice in chunk.choices):
                sample.chunks.append(now)

    sample.sent = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            await client.post(path, body, on_event)
    except TransferError as error:
        sample.error, sample.message = error.kind, str(error)
    except TimeoutError:
        sample.error = "timeout"
        sample.message = f"no answer within {timeout:g} s"
    if sample.error is None:
        if failure is not None:
            sample.error, sample.message = "error in the stream", str(failure)
        elif usage is None:
            sample.error = "no usage"
            sample.message = "the server sent no usage although stream_options.include_usage is set"
        else:
            sample.prompt_tokens = usage.prompt_tokens
            sample.output_tokens = usage.completion_tokens
    if sample.error is not None:
        sample.last = time.perf_counter()
