"""GET /metrics, and the timings that a request can ask for."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
from scrape import check_identities, numbers, reasons, wait_for

from octavo.core.entry.server.answer import Report
from octavo.core.params import SamplingParams
from octavo.core.types import RequestOutput, Timings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def test_metrics_add_up(http: httpx.Client) -> None:
    """Whatever ends a request, it is counted once, and its tokens are those in `usage`."""
    before = numbers(http)
    for _ in range(5):  # closed early
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "stream": True, "n": 2}
        with http.stream("POST", COMPLETIONS, json=body) as answer:
            next(answer.iter_lines())
    used = []
    for body in (
        {"prompt": "say:hi"},
        {"prompt": ["x", "yy"], "max_tokens": 5, "n": 2},
        {"prompt": "x", "max_tokens": 500, "stop": "fox"},
        {"prompt": "x", "max_tokens": 0, "echo": True},
    ):
        used.append(http.post(COMPLETIONS, json=body).json()["usage"])
    assert http.post(COMPLETIONS, json={"prompt": "refuse me"}).status_code == 400
    assert http.post(COMPLETIONS, json={"prompt": -1}).status_code == 400  # never a request
    wanted = {"abort": 5, "stop": 2, "length": 3, "error": 1}
    after = wait_for(http, lambda now: grown(before, now) == wanted)
    assert grown(before, after) == wanted
    check_identities(after)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained["requests_received_total"] == 11
    assert gained["samples_started_total"] == 10 + 1 + 4 + 1 + 1 + 1
    assert gained["request_prompt_tokens_sum"] == sum(u["prompt_tokens"] for u in used)
    assert gained["request_generation_tokens_sum"] == sum(u["completion_tokens"] for u in used)
    assert gained["time_to_first_token_seconds_count"] == 9  # nothing came of two
    assert gained['http_responses_total{path="/v1/completions",status="400"}'] == 2
    for stem in ("inference", "prefill", "decode"):
        assert gained[f"request_{stem}_time_seconds_count"] == 4
    tokens = gained["generation_tokens_total"]
    assert gained["inter_token_latency_seconds_count"] == tokens - 16  # but each sample's first


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    was = reasons(before)
    return {reason: count - was[reason] for reason, count in reasons(after).items()}


def test_many_scrapers_harm_nobody(http: httpx.Client) -> None:
    """They share questions to the engine."""
    url = str(http.base_url)
    failed: list[Any] = []

    def scrape() -> None:
        with httpx.Client(base_url=url, timeout=30) as own:
            for _ in range(10):
                if own.get("/metrics").status_code != 200:
                    failed.append(1)

    scrapers = [threading.Thread(target=scrape) for _ in range(5)]
    for one in scrapers:
        one.start()
    answer = http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 300})
    for one in scrapers:
        one.join()
    assert answer.json()["usage"]["completion_tokens"] == 300 and not failed


def test_a_request_tells_where_its_time_went(client: openai.OpenAI) -> None:
    asked = {"extra_body": {"include_metrics": True}, "model": "null"}
    say = [{"role": "user", "content": "say:hi"}]
    chat: Any = client.chat.completions.create(messages=say, **asked)  # type: ignore[call-overload]
    assert chat.metrics["stopped_by"] == ["eos"]
    assert set(chat.metrics) == {
        *("stopped_by", "queued_seconds", "prefill_seconds", "time_to_first_token_seconds"),
        *("decode_seconds", "total_seconds", "cached_tokens", "recomputed_tokens", "preemptions"),
        *("swaps", "drafted_tokens", "accepted_tokens"),
    }
    assert 0 < chat.metrics["decode_seconds"] <= chat.metrics["total_seconds"] < 10
    for fields, why in (
        ({"prompt": "x", "stop": "qui"}, ["stop_string"]),
        ({"prompt": "x", "stop": "qui", "n": 2}, ["stop_string"] * 2),
        ({"prompt": "x"}, ["max_tokens"]),
        ({"prompt": "x" * 4085, "max_tokens": 100}, ["context_length"]),
    ):
        one: Any = client.completions.create(**asked, **fields)  # type: ignore[call-overload]
        assert one.metrics["stopped_by"] == why
    two: Any = client.completions.create(prompt=["say:a", "x"], **asked)  # type: ignore[call-overload]
    assert [m["stopped_by"] for m in two.metrics] == [["eos"], ["max_tokens"]]
    plain: Any = client.completions.create(prompt="say:a", model="null")
    assert not hasattr(plain, "metrics")


def test_a_stream_tells_it_in_one_more_chunk(http: httpx.Client) -> None:
    for path, prompt in (
        (COMPLETIONS, {"prompt": "say:hi"}),
        (CHAT, {"messages": [{"role": "user", "content": "say:hi"}]}),
    ):
        for usage in ({}, {"stream_options": {"include_usage": True}}):
            body = {**prompt, **usage, "stream": True, "include_metrics": True}
            lines = [line for line in http.post(path, json=body).text.split("\n\n") if line]
            last = json.loads(lines[-2][6:])
            assert last["choices"] == [] and last["metrics"]["stopped_by"] == ["eos"]
            assert ("usage" in last) == bool(usage)
            assert not any('"metrics"' in line for line in lines[:-2])


def test_blocks_are_told_where_there_was_someone_to_share_them() -> None:
    for timings, told in (
        (Timings(), {}),
        (
            Timings(peak_blocks=9, peak_logical_blocks=20),
            {"peak_blocks": 9, "peak_logical_blocks": 20},
        ),
    ):
        report = Report(True, SamplingParams(n=4))
        report.add(0, RequestOutput("a", "x", [1], [], True, metrics=timings))
        metrics = report.fields()["metrics"]
        assert {name: metrics[name] for name in metrics if name.startswith("peak")} == told
