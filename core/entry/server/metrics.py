"""GET /metrics: the engine's counters and the front's, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from octavo.core.entry.async_llm import AsyncLLM
from octavo.core.output import Counts
from octavo.core.types import Timings

# `EngineStats` -> name and meaning.
_GAUGES = {
    "running": ("octavo_sequences_running", "Sequences in the running batch"),
    "waiting": ("octavo_sequences_waiting", "Sequences that wait to be admitted"),
    "kv_blocks_total": ("octavo_kv_blocks", "KV blocks there are"),
    "kv_blocks_used": ("octavo_kv_blocks_used", "KV blocks that sequences hold"),
    "kv_blocks_cached": ("octavo_kv_blocks_cached", "Free KV blocks that keep a known prefix"),
}
_COUNTERS = {
    "steps": ("octavo_steps", "Steps run"),
    "preemptions": ("octavo_preemptions", "Sequences that gave up their blocks and began again"),
    "evictions": ("octavo_kv_evictions", "Cached blocks that were taken for something else"),
    "prefix_query_tokens": ("octavo_prefix_cache_queries", "Prompt tokens looked up"),
    "prefix_hit_tokens": ("octavo_prefix_cache_hits", "Prompt tokens found in the prefix cache"),
}
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """What one server counts. Samples are counted, not requests: each of n ends by itself, and once
    nothing is open octavo_samples_started equals the sum of octavo_samples_finished over reasons."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=self._registry)

        self._first = histogram(
            "octavo_time_to_first_token_seconds", "From arrival to the first token", _SECONDS
        )
        self._queue = histogram("octavo_queue_seconds", "From arrival to the first step", _SECONDS)
        self._whole = histogram(
            "octavo_request_seconds", "From arrival to the last token", _SECONDS
        )
        self._token = histogram(
            "octavo_time_per_output_token_seconds", "Between tokens, mean of one", _TOKEN_SECONDS
        )
        llm.on_finished = self._finished

    def _finished(self, timings: Timings, tokens: list[int]) -> None:
        if not timings.first_token:
            return
        self._first.observe(timings.time_to_first_token)
        self._queue.observe(timings.queue_time)
        self._whole.observe(max(0.0, timings.last_token - timings.queued))
        if (longest := max(tokens)) > 1:
            self._token.observe((timings.last_token - timings.first_token) / (longest - 1))

    async def text(self) -> bytes:
        """The exposition, with the engine's numbers of this moment.

        Raises:
            EngineDeadError: there is no engine to ask.
        """
        stats = await self._llm.stats()
        registry = CollectorRegistry()
        registry.register(_Snapshot(stats, self._llm.counts))
        return generate_latest(registry) + generate_latest(self._registry)


class _Snapshot:
    def __init__(self, stats: dict[str, Any], counts: Counts) -> None:
        self._stats = stats
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """One scrape's metrics."""
        for name, (metric, text) in _GAUGES.items():
            if name in self._stats:
                yield GaugeMetricFamily(metric, text, self._stats[name])
        for name, (metric, text) in _COUNTERS.items():
            if name in self._stats:
                yield CounterMetricFamily(metric, text, self._stats[name])
        counts = self._counts
        yield CounterMetricFamily("octavo_prompt_tokens", "Prompt tokens", counts.prompt_tokens)
        yield CounterMetricFamily("octavo_output_tokens", "Output tokens", counts.output_tokens)
        yield CounterMetricFamily("octavo_samples_started", "Samples begun", counts.started)
        finished = CounterMetricFamily(
            "octavo_samples_finished", "Samples ended, by reason", labels=["reason"]
        )
        for reason, number in counts.finished.items():
            finished.add_metric([reason], number)
        yield finished
