"""Requests that cannot be served, and servers that are not well."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import psutil
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "say:hi"}]


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": -1}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [259]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "stop": [1]}, "stop[0]"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": -2}, "logprobs"),
        ({"prompt": "x", "stop_token_ids": [259]}, "stop_token_ids"),
        ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "x", "min_tokens": 20}, "min_tokens"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": "x", "truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
        ({"prompt": "x", "logit_bias": {"191222": -100}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"AI": -100}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"5": "NaN"}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        # What is not there is not ignored.
        ({"prompt": "x", "suffix": "end"}, "suffix"),
        ({"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "x", "use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"prompt": "x", "use_beam_search": True, "seed": 3}, "seed"),
        ({"prompt": "x", "n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "stream": True, "stream_options": {"usage": 1}}, "stream_options.usage"),
        ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "priority": 2**70}, "priority"),
        ({"prompt": ["x"] * 5000}, "prompt"),
        ({"prompt": "x", "cache_salt": "a/b"}, "cache_salt"),
        ({"prompt": "x", "cache_salt": "a" * 129}, "cache_salt"),
        # Refused by the engine itself.
        ({"prompt": "refuse me"}, "prompt"),
        ({"prompt": "bad param", "stream": True}, "top_k"),
        ({"prompt": ["say:fine", "refuse me"]}, "prompt"),
    ],
)
def test_completions_name_the_field(http: httpx.Client, fields: Any, param: str) -> None:
    error = error_of(http.post(COMPLETIONS, json=fields))
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "nme": "y"}]}, "messages[0].nme"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"messages": USER, "logprobs": 3}, "logprobs"),
        ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ({"messages": USER, "audio": {"voice": "x"}}, "audio"),
        ({"messages": USER, "modalities": ["audio"]}, "modalities"),
        ({"messages": USER, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": USER, "store": True}, "store"),
        ({"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": USER, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        (
            {
                "messages": USER,
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
    ],
)
def test_chat_names_the_field(http: httpx.Client, fields: Any, param: str) -> None:
    assert error_of(http.post(CHAT, json=fields))["param"] == param


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param", "number"),
    [
        ({"n": 0}, "n", "0"),
        ({"n": 2000}, "n", "1024"),
        ({"n": True}, "n", ""),
        ({"temperature": -1}, "temperature", "-1"),
        ({"temperature": [1]}, "temperature", ""),
        ({"top_p": 0}, "top_p", "0"),
        ({"top_p": 2}, "top_p", "2"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"min_p": 1.5}, "min_p", "1.5"),
        ({"presence_penalty": 3}, "presence_penalty", "3"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": "5"}, "max_tokens", ""),
        ({"max_tokens": 2**80}, "max_tokens", ""),
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "9"),
        ({"stop": [""]}, "stop", ""),
        ({"stop": {}}, "stop", ""),
        ({"seed": 2**65}, "seed", ""),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
        ({"allowed_token_ids": [259]}, "allowed_token_ids", "258"),
        ({"logit_bias": {"259": 1}}, "logit_bias", "258"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
        ({"priority": 1.5}, "priority", ""),
    ],
)
def test_both_endpoints_check_the_same(
    http: httpx.Client, path: str, fields: Any, param: str, number: str
) -> None:
    """The message has the value or the bound."""
    given = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    error = error_of(http.post(path, json={**given, **fields}))
    assert error["param"] == param and number in error["message"]


def test_values_that_ask_for_nothing_are_taken(http: httpx.Client) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "parallel_tool_calls": True,
        "reasoning_effort": None,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "service_tier": "auto",
        "user": "someone",
        "metadata": {"a": "b"},
        "temperature": None,
        "stop": None,
    }
    answer = http.post(CHAT, json={"messages": USER, **neutral})
    assert answer.json()["choices"][0]["message"]["content"] == "hi"


def test_unknown_fields_get_a_suggestion(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'") as caught:
        client.completions.create(model="null", prompt="x", extra_body={"temprature": 1})
    assert caught.value.param == "temprature"


def test_an_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="null, org/name") as caught:
        client.completions.create(model="gpt-5", prompt="x")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x"} trailing',
        b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}",
        b'{"prompt": "x", "temperature": 1e-' + b"9" * 1000 + b"x}",
        b'{"\xff\xfe": 1}',
        b'{"metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b"\x1f\x8b" + b"\0" * 100,  # gzip, or so it says
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_bodies_that_are_not_json(http: httpx.Client, path: str, body: bytes) -> None:
    error_of(http.post(path, content=body))


def test_bodies_that_are_too_large(http: httpx.Client) -> None:
    error_of(http.post(COMPLETIONS, content=b"x" * (33 << 20)), 413)

    def drip() -> Any:
        for _ in range(40):
            yield b"x" * (1 << 20)

    error_of(http.post(COMPLETIONS, content=drip()), 413)


def test_routes_that_are_not_there(http: httpx.Client) -> None:
    error_of(http.get("/nope"), 404)
    error_of(http.post("/v1/rerank", json={}), 404)
    error_of(http.get(COMPLETIONS), 405)
    error_of(http.post("/v1/models"), 405)


def test_a_bad_request_harms_nobody_else(http: httpx.Client) -> None:
    results: list[httpx.Response] = []
    body = {"prompt": "x", "max_tokens": 200}
    worker = threading.Thread(target=lambda: results.append(http.post(COMPLETIONS, json=body)))
    worker.start()
    for _ in range(20):
        error_of(http.post(COMPLETIONS, json={"prompt": "x", "logit_bias": {"999": 1}}))
    worker.join()
    assert results[0].json()["usage"]["completion_tokens"] == 200


def test_a_client_that_goes_away_ends_its_request(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_STEP_SECONDS="0.002", NULL_ENGINE_SHUTDOWN="60")
    server.wait_ready()
    for stream in (True, False):
        body = {"prompt": ["x", "y"], "max_tokens": 4000, "stream": stream, "n": 2}
        with server.http() as http:
            if stream:
                with http.stream("POST", COMPLETIONS, json=body) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(COMPLETIONS, json=body, timeout=0.3)
    started = time.monotonic()
    assert server.stop() == 0  # would wait for the requests, were they still there
    assert time.monotonic() - started < 20


def test_loading_and_ready(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_LOAD_SECONDS="1")
    server.wait_for(lambda status: status == 503)
    with server.http() as http:
        error = error_of(http.post(CHAT, json={"messages": USER}), 503)
        assert "loading" in error["message"] and error["type"] == "server_error"
        error_of(http.get("/v1/models"), 503)
    server.wait_ready()
    assert server.stop(signal.SIGINT) == 0
    assert "ready at http://127.0.0.1" in server.process.stdout.read()


def test_a_signal_while_loading(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_LOAD_SECONDS="30")
    server.wait_for(lambda status: status == 503)
    children = server.children()
    assert server.stop() == 0 and children
    assert not any(psutil.pid_exists(pid) for pid in children)


def test_the_engine_crashes(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_STEP_SECONDS="0.002")
    server.wait_ready()
    children = server.children()
    client = server.client()
    stream = client.completions.create(model="null", prompt="x", max_tokens=4000, stream=True)
    next(stream)
    with pytest.raises(openai.InternalServerError, match="exit code 7"):
        client.completions.create(model="null", prompt="crash now", max_tokens=5)
    with pytest.raises(openai.APIError, match="exit code 7"):  # after the 200: an error event
        for _ in stream:
            pass
    assert server.process.wait(15) == 1
    assert "octavo: error: the engine process ended unexpectedly (exit code 7)" in (
        server.stderr.read_text()
    )
    assert not any(psutil.pid_exists(pid) for pid in children)


def until(done: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def test_requests_that_run_at_shutdown_are_finished_or_ended(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_STEP_SECONDS="0.01", NULL_ENGINE_SHUTDOWN="3")
    server.wait_ready()
    children = server.children()
    events: dict[int, list[str]] = {40: [], 4000: []}

    def read(count: int) -> None:
        body = {"prompt": "x", "max_tokens": count, "stream": True}
        with server.http() as http, http.stream("POST", COMPLETIONS, json=body) as answer:
            for line in filter(None, answer.iter_lines()):
                events[count].append(line)

    workers = [threading.Thread(target=read, args=(count,)) for count in events]
    for worker in workers:
        worker.start()
    until(lambda: all(events.values()))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(15) == 0
    for worker in workers:
        worker.join()
    assert events[40][-1] == "data: [DONE]"
    assert "shut down" in json.loads(events[4000][-1][6:])["error"]["message"]
    assert not any(psutil.pid_exists(pid) for pid in children)


def test_new_requests_are_refused_and_the_second_signal_does_not_wait(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_STEP_SECONDS="0.005", NULL_ENGINE_SHUTDOWN="60")
    server.wait_ready()
    stream = server.client().completions.create(
        model="null", prompt="x", max_tokens=4000, stream=True
    )
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda status: status == 503)
    with server.http() as http:  # new requests are told to come back
        answer = http.post(CHAT, json={"messages": USER})
        assert "shutting down" in error_of(answer, 503)["message"]
        assert answer.headers["retry-after"]
        assert http.get("/health").status_code == 503
    assert server.stop() == 0
    with pytest.raises(openai.APIError, match="shut down"):
        for _ in stream:
            pass


def test_a_model_that_cannot_be_loaded_ends_the_server(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_MODEL="no-such-model")
    assert server.process.wait(15) != 0
    assert "no model of that name" in server.stderr.read_text()


def test_the_api_key(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_OPTIONS='{"api_keys": ["other", "secret"]}')
    server.wait_ready()
    with pytest.raises(openai.AuthenticationError, match="API key"):
        server.client().models.list()
    assert server.client(api_key="secret").models.list().data[0].id == "null"
    with server.http() as http:
        assert http.get("/health").status_code == 200
