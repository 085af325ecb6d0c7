"""GET /metrics: what the engine counts and what was counted here, for Prometheus.

Names are vLLM's with octavo_ in front, so that a dashboard is ported by replacing a prefix.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

import octavo
from octavo.core.entry.async_llm import AsyncLLM
from octavo.core.request_stats import Histogram, RequestStats

PATIENCE = 0.5
"""Seconds to wait for the engine, which answers between two steps. Then its last answer stands in."""

# A key of the engine's statistics -> stem of the name, and meaning.
_GAUGES = {
    "running": ("num_requests_running", "Sequences in the running batch"),
    "waiting": ("num_requests_waiting", "Sequences that wait to be admitted"),
    "waiting_for_prefix": (
        "num_requests_waiting_for_prefix",
        "Those of them that wait for a prefix which another sequence is computing",
    ),
    "kv_blocks_total": ("kv_blocks", "KV blocks there are"),
    "kv_blocks_used": ("kv_blocks_allocated", "KV blocks that sequences hold"),
    "kv_blocks_cached": ("kv_blocks_cached", "Free KV blocks that keep a known prefix"),
    "host_blocks_total": ("host_blocks", "KV blocks that host memory holds (--swap-space)"),
    "host_blocks_used": ("host_blocks_used", "Those of them that hold one, or are kept for one"),
    "host_blocks_pinned": ("host_blocks_pinned", "Those of them that waiting sequences count on"),
    "kv_slots_allocated": ("kv_slots_allocated", "Tokens for which sequences hold room"),
    "kv_slots_used": ("kv_slots_used", "Tokens in the KV cache that sequences hold"),
    "kv_slots_wasted": ("kv_slots_wasted", "Tokens for which there is room that nothing fills"),
}
_COUNTERS = {
    "steps": ("engine_steps", "Steps run"),
    "preemptions": ("num_preemptions", "Sequences that gave up their blocks to others"),
    "swaps": ("num_swaps", "Those of the preempted whose blocks were kept in host memory"),
    "swapped_out_blocks": ("swapped_out_blocks", "KV blocks copied to host memory"),
    "swapped_in_blocks": ("swapped_in_blocks", "KV blocks copied back from there"),
    "evictions": ("kv_evictions", "Cached blocks that were taken for something else"),
    "prefix_query_tokens": ("prefix_cache_queries", "Prompt tokens looked up"),
    "prefix_hit_tokens": ("prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    "host_hit_tokens": ("host_cache_hits", "Those of the hits whose blocks came from host memory"),
    "prefix_waits": ("prefix_cache_waits", "Waits for a prefix that another was computing"),
    "drafts": ("spec_decode_num_drafts", "Drafts that a step checked"),
    "drafted_tokens": ("spec_decode_num_draft_tokens", "Tokens of these drafts"),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Those of them that were right"),
    "compilations": ("compilations", "Programs that the device compiled: none after the start"),
    "output_tokens": ("engine_generation_tokens", "Tokens drawn, those nobody got included"),
}
# A field of `RequestStats` -> the same.
_HISTOGRAMS = {
    "first_token": ("time_to_first_token_seconds", "From request to first token"),
    "inter_token": ("inter_token_latency_seconds", "From one token of a sample to the next"),
    "token": ("time_per_output_token_seconds", "Mean time between tokens of a request"),
    "whole": ("e2e_request_latency_seconds", "From request to last token"),
    "queue": ("request_queue_time_seconds", "From request to first step"),
    "inference": ("request_inference_time_seconds", "From first step to last token"),
    "prefill": ("request_prefill_time_seconds", "From first step to first token"),
    "decode": ("request_decode_time_seconds", "From first token to last"),
    "prompt_lengths": ("request_prompt_tokens", "Prompt tokens of a request"),
    "output_lengths": ("request_generation_tokens", "Output tokens of a sample"),
    "asked_n": ("request_params_n", "Samples asked for"),
    "asked_tokens": ("request_params_max_tokens", "Output tokens allowed"),
}


class Metrics:
    """What one server shows."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._asked: asyncio.Future[dict[str, Any]] | None = None
        self.responses: Counter[tuple[str, int]] = Counter()
        """HTTP answers by (path of the route, status)."""

    async def text(self) -> bytes:
        """The exposition, with the engine's numbers of this moment.

        Raises:
            EngineDeadError: there is no engine to ask.
        """
        self._llm.check_health()
        await self._ask()
        registry = CollectorRegistry()
        registry.register(_Snapshot(self))
        return generate_latest(registry)

    async def _ask(self) -> None:
        """At most one question is on its way, however many scrapers there are."""
        asked = self._asked
        if asked is None or asked.done():
            asked = self._asked = asyncio.ensure_future(self._llm.stats())
        done, _ = await asyncio.wait({asked}, timeout=PATIENCE)
        if done:
            asked.result()

    def collect(self) -> Iterable[Metric]:
        """One scrape's metrics."""
        llm, pulse = self._llm, self._llm.pulse
        info = llm.info
        about = GaugeMetricFamily("octavo_engine_info", "What runs here", labels=_ABOUT)
        about.add_metric(
            [octavo.__version__, *(str(getattr(info, n) or "none") for n in _ABOUT[1:])], 1
        )
        yield about
        yield from _engine_metrics(pulse.stats)
        yield GaugeMetricFamily(
            "octavo_engine_stats_age_seconds",
            "How old the engine's numbers are",
            time.monotonic() - pulse.stats_at if pulse.stats_at else 0,
        )
        yield from _request_metrics(llm.request_stats)
        yield GaugeMetricFamily("octavo_requests_open", "Requests not ended", llm.num_open)
        responses = CounterMetricFamily(
            "octavo_http_responses", "HTTP answers", labels=["path", "status"]
        )
        for (path, status), number in sorted(self.responses.items()):
            responses.add_metric([path, str(status)], number)
        yield responses


_ABOUT = ("version", "name", "backend", "device", "dtype", "quantization", "kv_dtype")


class _Snapshot:
    """What prometheus_client registers; `Metrics` outlives the registries."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """One scrape's metrics."""
        return self._metrics.collect()


def _engine_metrics(stats: dict[str, Any]) -> Iterable[Metric]:
    for name, (stem, text) in _GAUGES.items():
        if name in stats:
            yield GaugeMetricFamily(f"octavo_{stem}", text, stats[name])
    if total := stats.get("kv_blocks_total"):
        share = stats["kv_blocks_used"] / total
        yield GaugeMetricFamily("octavo_kv_cache_usage_perc", "Share of KV blocks held, 0-1", share)
    for name, (stem, text) in _COUNTERS.items():
        if name in stats:
            yield CounterMetricFamily(f"octavo_{stem}", text, stats[name])
    if "prefix_miss_tokens" in stats:
        misses = CounterMetricFamily(
            "octavo_prefix_cache_misses", "Prompt tokens looked up and not found", labels=["reason"]
        )
        for reason, number in stats["prefix_miss_tokens"].items():
            misses.add_metric([reason], number)
        yield misses


def _request_metrics(stats: RequestStats) -> Iterable[Metric]:
    for name, text, value in (
        ("requests_received", "Requests handed to the engine", stats.received),
        ("prompt_tokens", "Prompt tokens processed", stats.prompt_tokens),
        ("generation_tokens", "Output tokens that callers got", stats.generation_tokens),
        ("embeddings", "Embeddings that callers got", stats.embeddings),
        ("recomputed_tokens", "Tokens computed again after preemption", stats.recomputed_tokens),
        ("samples_started", "Samples begun: n for each request", stats.samples_started),
    ):
        yield CounterMetricFamily(f"octavo_{name}", text, value)
    for name, text, reasons in (
        ("request_success", "Requests ended, by reason", stats.finished),
        ("samples_finished", "Samples ended, by reason", stats.samples_finished),
    ):
        family = CounterMetricFamily(f"octavo_{name}", text, labels=["finished_reason"])
        for reason, number in reasons.items():
            family.add_metric([reason], number)
        yield family
    for name, (stem, text) in _HISTOGRAMS.items():
        yield _histogram(f"octavo_{stem}", text, getattr(stats, name))


def _histogram(name: str, text: str, values: Histogram) -> Metric:
    up_to, buckets = 0, []
    for bound, count in zip((*values.bounds, "+Inf"), values.counts, strict=True):
        up_to += count
        buckets.append((str(bound), up_to))
    family = HistogramMetricFamily(name, text)
    family.add_metric([], buckets, values.total)
    return family
