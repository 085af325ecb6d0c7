"""Load on a server: a sweep over request rates and limits of concurrency, and what is made of it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo.core.entry.bench.http_client import Client
from octavo.core.entry.bench.load import Run, Sample, arrivals, run_load
from octavo.core.entry.bench.stats import summary
from octavo.core.entry.bench.workload import Item, Workload

Api = Literal["completions", "chat"]
PATHS: dict[Api, str] = {"completions": "/completions", "chat": "/chat/completions"}

FORMULAS = """\
TTFT  first chunk with text - request sent          (s -> ms, over requests)
E2E   last chunk - request sent                     (s -> ms, over requests)
TPOT  (E2E - TTFT) / (output tokens - 1)            (s -> ms, over requests of 2 tokens or more)
ITL   chunk with text - the one before it           (s -> ms, over all gaps of all requests)
req/s requests that succeeded / seconds from the first request sent to the last chunk
tok/s output tokens of these / the same seconds; token counts are the server's own usage
good  requests within every --goodput limit / the same seconds
A chunk may hold several tokens when a server merges them: then ITL exceeds TPOT."""

GOODPUT_KEYS = ("ttft", "tpot", "e2e")


class Words:
    """Stands in for a tokenizer that is not known: a word is a token, about 1.3 of a real one's.

    What a request really held is in the server's usage.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        """The words with the space around them, so that decoding brings the text back."""
        found = []
        for word in re.findall(r"\s*\S+", text):
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
            found.append(self._ids[word])
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Ids back to text."""
        return "".join(self._words[i] for i in ids)


@dataclass(frozen=True)
class Target:
    """How requests are written.

    model: name in the API. text: token ids -> text, or None to send the ids themselves (completions
    only). ignore_eos: ask for exactly the output length, an extension that many servers know.
    """

    model: str
    api: Api = "completions"
    text: Callable[[Sequence[int]], str] | None = None
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, item: Item, turn: int = 0) -> bytes:
        """JSON of a request. `turn` moves the prompt's first tokens to its end: the same tokens in
        the same number, but no prefix that an earlier turn left in the server's cache."""
        ids = item.prompt_token_ids
        turn %= len(ids)
        ids = ids[turn:] + ids[:turn]
        values: dict[str, Any] = {
            "model": self.model,
            "max_tokens": item.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        prompt: Any = self.text(ids) if self.text is not None else ids
        if self.api == "chat":
            values["messages"] = [{"role": "user", "content": prompt}]
        else:
            values["prompt"] = prompt
        if self.ignore_eos and item.schema is None:
            values["ignore_eos"] = True
        if item.schema is not None:
            values["structured_outputs"] = {"json": item.schema}
        return msgspec.json.encode(values | dict(self.extra))


@dataclass(frozen=True)
class Point:
    """One load of a sweep.

    rate: requests a second, infinite for all at once. concurrency: most under way, None: no limit.
    """

    rate: float
    concurrency: int | None
    run: Run

    @property
    def mean_in_flight(self) -> float:
        """Requests under way on average (Little's law)."""
        return sum(sample.e2e for sample in self.run.samples) / self.run.seconds

    def within(self, limits: Mapping[str, float]) -> list[Sample]:
        """Requests that succeeded within every limit (GOODPUT_KEYS -> milliseconds)."""
        return [
            sample
            for sample in self.run.good
            if all((getattr(sample, k) or 0.0) * 1e3 <= most for k, most in limits.items())
        ]

    def values(self, limits: Mapping[str, float]) -> dict[str, Any]:
        """Everything for JSON; latencies are in seconds, infinite rates the word "inf"."""
        run = self.run
        good, seconds = run.good, run.seconds
        prompt = sum(sample.prompt_tokens for sample in good)
        output = sum(sample.output_tokens for sample in good)
        found: dict[str, Any] = {
            "rate": "inf" if math.isinf(self.rate) else self.rate,
            "concurrency": self.concurrency,
            "requests": len(run.samples),
            "succeeded": len(good),
            "errors": run.errors,
            "error_messages": run.messages,
            "seconds": seconds,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "requests_per_second": len(good) / seconds,
            "output_tokens_per_second": output / seconds,
            "total_tokens_per_second": (prompt + output) / seconds,
            "mean_in_flight": self.mean_in_flight,
            "most_in_flight": run.most_in_flight,
            "ttft": summary([sample.ttft for sample in good]),
            "tpot": summary([t for sample in good if (t := sample.tpot) is not None]),
            "itl": summary([gap for sample in good for gap in sample.gaps]),
            "e2e": summary([sample.e2e for sample in good]),
            "held_back": summary([sample.sent - sample.due for sample in good]),
            "client": {"lag_seconds": run.lag, "cpu_share": run.client_cpu / seconds},
        }
        if limits:
            within = len(self.within(limits))
            found["goodput_per_second"] = within / seconds
            found["goodput_share"] = within / len(run.samples) if run.samples else 0.0
        return found


async def sweep(
    client: Client,
    target: Target,
    workload: Workload,
    rates: Sequence[float],
    limits: Sequence[int | None],
    *,
    timeout: float = 600.0,
    on_point: Callable[[float, int | None], None] | None = None,
) -> list[Point]:
    """Sends the workload once for each rate and limit, each time to its end.

    Args:
        limits: most requests under way, None for no limit.
        timeout: seconds until a request is given up.
    """
    path = PATHS[target.api]
    warm_up = [target.body(item) for item in workload.warm_up]
    await run_load(client, path, warm_up, [0.0] * len(warm_up), timeout=timeout)
    points = []
    for turn, (rate, limit) in enumerate(itertools.product(rates, limits)):
        if on_point is not None:
            on_point(rate, limit)
        bodies = [target.body(item, turn) for item in workload.items]
        starts = arrivals(len(bodies), rate, workload.seed)
        run = await run_load(client, path, bodies, starts, concurrency=limit, timeout=timeout)
        points.append(Point(rate, limit, run))
    return points
