"""Reading /metrics in tests."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

REASONS = ("stop", "length", "abort", "error")
Numbers = dict[str, float]


def numbers(http: httpx.Client) -> Numbers:
    """Every sample of one scrape, without the octavo_ in front."""
    lines = http.get("/metrics").raise_for_status().text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.removeprefix("octavo_"): float(value) for name, value in pairs}


def reasons(found: Numbers, family: str = "request_success") -> dict[str, float]:
    """A family's counts by finish reason."""
    return {r: found[f'{family}_total{{finished_reason="{r}"}}'] for r in REASONS}


def wait_for(http: httpx.Client, done: Callable[[Numbers], bool], seconds: float = 60) -> Numbers:
    """Scrapes until it holds; the last scrape."""
    deadline = time.monotonic() + seconds
    while not done(found := numbers(http)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def check_identities(found: Numbers) -> None:
    """What always holds, whatever became of the requests."""
    open_now = found["requests_open"]
    assert found["requests_received_total"] == sum(reasons(found).values()) + open_now, found
    if not open_now:
        ended = sum(reasons(found, "samples_finished").values())
        assert found["samples_started_total"] == ended, found
        assert found["num_requests_running"] == found["num_requests_waiting"] == 0, found
    finished = reasons(found)["stop"] + reasons(found)["length"]
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert found[f"{name}_count"] == finished, (name, found)
    assert found["request_prompt_tokens_sum"] <= found["prompt_tokens_total"]
    assert found["request_generation_tokens_sum"] <= found["generation_tokens_total"]
