"""What a server can be told: leniency, a bound on its queue, who may call it, when it is ill."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from scrape import wait_for

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = [{"role": "user", "content": "say:hi"}]


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory, start_server: Any) -> Iterator[Any]:
    """One server with everything switched on that does not get in the way of the rest."""
    options = {
        "lenient": True,
        "max_queue": 2,
        "stall_seconds": 0.4,
        "allowed_origins": ["https://page.example"],
    }
    started = start_server(
        tmp_path_factory.mktemp("special"),
        NULL_ENGINE_OPTIONS=json.dumps(options),
        NULL_ENGINE_STALL_SECONDS="2.5",
    )
    started.wait_ready()
    yield started
    assert started.stop() == 0, started.stderr.read_text()


@pytest.fixture
def web(special: Any) -> Iterator[httpx.Client]:
    with special.http() as session:
        yield session


def test_a_lenient_server_says_what_it_left_out(web: httpx.Client) -> None:
    for stream in (False, True):
        fields = {
            "temprature": 1,
            "web_search_options": {},
            "store": False,  # asks for nothing
            "stream": stream,
            "stream_options": {"include_usage": True, "include_obfuscation": True, "x": 1},
        }
        if not stream:
            del fields["stream_options"]
        answer = web.post(CHAT, json={"messages": USER, **fields})
        assert answer.status_code == 200 and '"finish_reason":"stop"' in answer.text
        ignored = "temprature,web_search_options"
        if stream:
            ignored += ",stream_options.x,stream_options.include_obfuscation"
        assert answer.headers["x-octavo-ignored"] == ignored
    assert "x-octavo-ignored" not in web.post(CHAT, json={"messages": USER}).headers
    odd = web.post(COMPLETIONS, json={"prompt": "say:hi", "a\r\nb\u20ac": 1})
    assert odd.headers["x-octavo-ignored"] == "a??b\\u20ac"


def test_a_lenient_server_leaves_out_what_responses_have_not(web: httpx.Client) -> None:
    for stream in (False, True):
        fields = {
            "store": True,
            "truncation": "auto",
            "previous_response_id": "resp_1",
            "reasoning": {"effort": "low"},
            "temprature": 1,
            "background": False,  # asks for nothing
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
            "text": {"verbosity": "low", "tone": "warm"},
            "stream": stream,
            "stream_options": {"include_obfuscation": True, "include_usage": True},
        }
        answer = web.post(RESPONSES, json={"input": "say:hi", **fields})
        assert answer.status_code == 200, answer.text
        assert '"status":"completed"' in answer.text and '"text":"hi"' in answer.text
        assert answer.headers["x-octavo-ignored"].split(",") == [
            *(
                "store",
                "truncation",
                "previous_response_id",
                "reasoning",
                "temprature",
                "include[0]",
            ),
            *("text.verbosity", "text.tone"),
            *("stream_options.include_obfuscation", "stream_options.include_usage"),
        ]
    plain = web.post(RESPONSES, json={"input": "say:hi", "store": False, "truncation": "disabled"})
    assert plain.status_code == 200 and "x-octavo-ignored" not in plain.headers
    for wrong in ({"input": []}, {"input": "x", "include": "all"}, {"input": "x", "text": "short"}):
        assert web.post(RESPONSES, json=wrong).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "x", "temperature": "hot"}', "temperature"),
        (b'{"prompt": "x", "temperature": -1}', "temperature"),
        (b'{"tmperature": 1}', "prompt"),
        (b"[]", None),
        (b"{", None),
        (b"[" * 100_000, None),
    ],
)
def test_what_is_wrong_stays_wrong(web: httpx.Client, body: bytes, param: str | None) -> None:
    answer = web.post(COMPLETIONS, content=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_pages_of_an_allowed_origin_may_call(web: httpx.Client) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    good = {"origin": "https://page.example"}
    before = web.options(CHAT, headers={**good, **asks})
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == "https://page.example"
    answer = web.post(CHAT, json={"messages": USER}, headers=good)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    bad = {"origin": "https://else.example"}
    assert web.options(CHAT, headers={**bad, **asks}).status_code == 400
    assert "access-control-allow-origin" not in web.get("/health", headers=bad).headers


def test_capabilities(web: httpx.Client) -> None:
    found = web.get("/v1/capabilities").json()
    assert found["model"]["names"] == ["null"] and found["device"]["backend"] == "null"
    assert found["device"]["capabilities"] == {"dtypes": ["float32"], "seeded_sampling": True}
    assert found["limits"]["max_queue"] == 2 and found["limits"]["max_model_len"] == 4096
    assert "temperature" in found["parameters"][CHAT] and "audio" not in found["parameters"][CHAT]


def test_a_stalled_engine_turns_health_red_and_green_again(special: Any) -> None:
    """Also: what waits meanwhile is bounded, metrics are still there, and all is served at last."""
    results: list[int] = []

    def ask(text: str) -> None:
        with special.http() as own:
            results.append(own.post(COMPLETIONS, json={"prompt": text}).status_code)

    with special.http() as web:
        assert web.get("/health").status_code == 200
        askers = [threading.Thread(target=ask, args=(text,)) for text in ("stall now", "say:x")]
        for number, one in enumerate(askers, 1):
            one.start()
            found = wait_for(web, lambda now, open_=number: now["requests_open"] == open_)
            assert found["requests_open"] == number
        with pytest.raises(openai.RateLimitError, match="2 requests wait") as caught:
            special.client().completions.create(model="null", prompt="x")
        assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"]
        special.wait_for(lambda status: status == 503)
        error = web.get("/health").json()["error"]
        assert "finished no step and" in error["message"] and error["code"] == "engine_stalled"
        assert "octavo_requests_open 2.0" in web.get("/metrics").text
        assert web.get("/health").status_code == 503, "the metrics waited for the engine"
        for one in askers:
            one.join()
        assert results == [200, 200]
        special.wait_for(lambda status: status == 200)


def test_silence_is_no_illness(web: httpx.Client) -> None:
    time.sleep(0.6)
    assert web.get("/health").status_code == 200


def test_requests_are_logged(special: Any) -> None:
    with special.http() as web:
        web.post(CHAT, json={"messages": USER}, headers={"x-request-id": "find-me"})
        web.get("/v1/models/a%0Ab", headers={"x-request-id": "and-me"})
    deadline = time.monotonic() + 20
    lines: list[str] = []
    # A request is logged once its answer is out, so the client may be here first.
    while not any(line.endswith("id=and-me") for line in lines) and time.monotonic() < deadline:
        time.sleep(0.02)
        lines = special.stderr.read_text().splitlines()
    (line,) = [line for line in lines if line.endswith("id=find-me")]
    assert f"INFO POST {CHAT} 200 " in line and " ms 25+3 tokens " in line
    (line,) = [line for line in lines if line.endswith("id=and-me")]
    assert "GET /v1/models/a%0Ab 404 " in line
    assert not any("GET /health" in line and " 200 " in line for line in lines)
