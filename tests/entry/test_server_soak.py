"""The real scheduler with a tiny KV pool behind a server: nothing leaks, whatever clients do."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from load import post
from scrape import Numbers, check_identities, numbers, reasons, wait_for

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USABLE = 39  # KV blocks


@pytest.fixture(scope="module")
def hashing(tmp_path_factory: pytest.TempPathFactory, start_server: Any) -> Iterator[Any]:
    started = start_server(
        tmp_path_factory.mktemp("hash"),
        NULL_ENGINE_ENGINE="hash_engine",
        HASH_ENGINE_STEP_SECONDS="0.002",
        NULL_ENGINE_OPTIONS='{"log_level": "warning"}',
    )
    started.wait_ready()
    yield started
    assert started.stop() == 0, started.stderr.read_text()
    assert not started.stderr.read_text().replace("loading nothing", "").strip()


def random_body(dice: random.Random) -> tuple[str, dict[str, Any]]:
    words = " ".join(dice.choice(("alpha", "beta", "gamma")) for _ in range(dice.randint(1, 20)))
    body: dict[str, Any] = {
        "max_tokens": dice.choice((1, 5, 20, 80, 200)),
        "n": dice.choice((1, 1, 1, 2, 4)),
        "stream": dice.random() < 0.6,
        "ignore_eos": dice.random() < 0.5,
        "temperature": dice.choice((0, 1)),
        "seed": dice.choice((None, 7)),
        "stop": dice.choice((None, None, "ab", ["q", "zz"])),
        "logprobs": None,
        "priority": dice.choice((0, 0, 0, -1, 5)),
        "cache_salt": dice.choice((None, None, "s")),
        "include_metrics": dice.random() < 0.3,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if dice.random() < 0.4:
        return CHAT, {**body, "messages": [{"role": "user", "content": words}]}
    prompt: Any = ["shared beginning " * 5 + words] * dice.choice((1, 1, 1, 3))
    return COMPLETIONS, {**body, "prompt": prompt}


BAD: tuple[dict[str, Any], ...] = (
    {"prompt": [[-1]]},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x" * 600},
    {"prompt": "x", "max_tokens": 400, "n": 13},  # refused by the engine: too many at once
    {"prompt": "x", "nonsense": 1},
)


async def storm(port: int, count: int, seed: int) -> Counter[str]:
    """Random requests, 24 at a time; what became of them and of their tokens."""
    dice = random.Random(seed)
    seen: Counter[str] = Counter()
    room = asyncio.Semaphore(24)

    async def one() -> None:
        path, body = random_body(dice)
        chance = dice.random()
        leave = dice.choice((0, 1, 300, 2000)) if chance < 0.25 else None
        if chance > 0.93:
            path, body, leave = COMPLETIONS, dice.choice(BAD), None
        async with room:
            reply = await post(port, path, body, leave_after=leave)
        if reply.status == 0:
            seen["left"] += 1
            return
        seen[str(reply.status)] += 1
        if reply.status == 400:
            assert reply.json()["error"]["message"]
            return
        assert reply.status == 200, reply.body
        answer = reply.events()[-1] if body["stream"] else reply.json()
        seen["prompt"] += answer["usage"]["prompt_tokens"]
        seen["output"] += answer["usage"]["completion_tokens"]
        if body["include_metrics"]:
            metrics = answer["metrics"]
            for each in metrics if isinstance(metrics, list) else [metrics]:
                assert len(each["stopped_by"]) == body["n"] and each["total_seconds"] > 0
                seen["preempted"] += each["preemptions"]

    await asyncio.gather(*(one() for _ in range(count)))
    return seen


def soak(server: Any, count: int, seed: int) -> None:
    with server.http() as http:
        before = numbers(http)
        seen = asyncio.run(storm(server.port, count, seed))
        after = wait_for(http, is_quiet)
        assert is_quiet(after), after
        check_identities(after)
        gained = {name: after[name] - before.get(name, 0) for name in after}
        assert gained["prompt_tokens_total"] >= seen["prompt"]
        assert gained["generation_tokens_total"] >= seen["output"]
        assert gained["engine_generation_tokens_total"] >= gained["generation_tokens_total"]
        assert reasons(after)["error"] - reasons(before)["error"] <= seen["400"]
        assert seen["left"] and seen["400"] and seen["200"] > count / 2
        assert gained["num_preemptions_total"] >= seen["preempted"]
        assert gained["num_preemptions_total"] > 0, "the pool was never short"
        assert gained["prefix_cache_hits_total"] > 0


def is_quiet(now: Numbers) -> bool:
    return not (
        now["kv_blocks_allocated"]
        or now["requests_open"]
        or now["num_requests_running"]
        or now["num_requests_waiting"]
    )


def test_a_storm_leaves_nothing_behind(hashing: Any) -> None:
    soak(hashing, 150, seed=1)


@pytest.mark.slow
def test_a_long_storm_leaves_nothing_behind(hashing: Any) -> None:
    soak(hashing, 2000, seed=2)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory, start_server: Any) -> Iterator[Any]:
    """A server whose engine takes its time, so that a request can be met in each of its states."""
    started = start_server(
        tmp_path_factory.mktemp("slow"),
        NULL_ENGINE_ENGINE="hash_engine",
        HASH_ENGINE_STEP_SECONDS="0.1",
    )
    started.wait_ready()
    yield started
    assert started.stop() == 0, started.stderr.read_text()


LONG = {"max_tokens": 300, "ignore_eos": True, "stream": True}
STATES = {
    # prompt, what a scrape shows while it is in that state
    "decoding": ("x", lambda now: now["generation_tokens_total"] > 0),
    "prefilling": ("x" * 200, lambda now: now["num_requests_running"] == 1),
    "queued": ("y" * 200, lambda now: now["num_requests_waiting"] == 1),
}


@pytest.mark.parametrize("state", STATES)
def test_a_client_that_leaves_frees_its_blocks(slow: Any, state: str) -> None:
    """Within a second, whatever its request is at."""
    prompt, reached = STATES[state]

    async def run() -> None:
        with slow.http() as http:
            tokens = numbers(http)["generation_tokens_total"]
            others = []
            if state == "queued":  # one that leaves no room for another
                body = {**LONG, "prompt": "x" * 420, "max_tokens": 90}
                others.append(asyncio.ensure_future(post(slow.port, COMPLETIONS, body)))
                await until(lambda now: now["kv_blocks_allocated"] > 25)
            held = numbers(http)["kv_blocks_allocated"]
            ours = asyncio.ensure_future(post(slow.port, COMPLETIONS, {**LONG, "prompt": prompt}))
            now = await until(
                lambda now: reached(
                    {**now, "generation_tokens_total": now["generation_tokens_total"] - tokens}
                )
            )
            if state != "queued":
                assert now["kv_blocks_allocated"] > 0
            if state == "prefilling":
                assert now["generation_tokens_total"] == tokens
            ours.cancel()
            await asyncio.gather(ours, return_exceptions=True)
            left = time.monotonic()
            gone = await until(
                lambda now: (
                    now["requests_open"] == len(others)
                    and now["num_requests_waiting"] == 0
                    and (now["kv_blocks_allocated"] == 0 or bool(others))
                )
            )
            assert time.monotonic() - left < 1
            if others:
                assert gone["kv_blocks_allocated"] >= held  # the other one is still there
                others[0].cancel()
                await asyncio.gather(*others, return_exceptions=True)
                await until(is_quiet)

    async def until(done: Any) -> Numbers:
        def scrape() -> Numbers:
            with slow.http() as http:
                return wait_for(http, done)

        return await asyncio.to_thread(scrape)

    asyncio.run(run())


def test_usage_and_metrics_of_one_request(slow: Any) -> None:
    """Scheduler, engine process and server tell one story of a request's tokens."""
    with slow.http() as http:
        before = numbers(http)
        body = {"prompt": "q" * 40, "max_tokens": 3, "include_metrics": True, "ignore_eos": True}
        answers = [http.post(COMPLETIONS, json=body).json() for _ in range(2)]
        after = wait_for(http, is_quiet)
    assert [a["metrics"]["cached_tokens"] for a in answers] == [0, 32]
    details = [a["usage"]["prompt_tokens_details"] for a in answers]
    assert details[1]["cached_tokens"] == 32
    assert [d["cache_misses"] for d in details] == [
        [{"prompt": 0, "reason": "diverged", "at_token": 0, "tokens": 41}],
        [{"prompt": 0, "reason": "below_block", "at_token": 32, "tokens": 9}],
    ]
    first = answers[0]["metrics"]
    assert first["queued_seconds"] + first["prefill_seconds"] == pytest.approx(
        first["time_to_first_token_seconds"]
    )
    assert 0.15 < first["decode_seconds"] < 5 and first["stopped_by"] == ["max_tokens"]
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == 32
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 6
