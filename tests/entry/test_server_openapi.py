"""The OpenAPI document says what the server does, and the server does what it says."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.core.entry.server import schema as answers
from octavo.core.entry.server.openapi import document

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES = "/v1/responses"
PLAIN: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "input": "x"}
COMMON = {
    "messages",
    "prompt",
    "input",
    "tokens",
    "max_tokens",
    "max_output_tokens",
    "temperature",
    "stream",
}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


# Not schemathesis' own parametrisation: it does not keep up with pytest.
OPERATIONS = [
    found.ok()
    for found in schemathesis.openapi.from_dict(json.loads(document())).get_all_operations()
]


@pytest.mark.parametrize(
    ("operation", "fits"),
    [
        pytest.param(operation, fits, id=f"{operation.label}-{'fits' if fits else 'does not fit'}")
        for operation in OPERATIONS
        for fits in ((True, False) if operation.body else (True,))
    ],
)
def test_whatever_fits_the_document_or_does_not(server: Any, operation: Any, fits: bool) -> None:
    """No 5xx, no hang, answers and errors of the form that the document promises."""
    mode = GenerationMode.POSITIVE if fits else GenerationMode.NEGATIVE
    statuses = Counter[int]()
    cases = itertools.count()

    @settings(
        max_examples=50 if operation.method == "post" else 5,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def attack(case: Any) -> None:
        if isinstance(case.body, dict) and case.path in (COMPLETIONS, CHAT):
            for name, most in (("n", 2), ("max_tokens", 20), ("max_completion_tokens", 20)):
                value = case.body.get(name)
                if type(value) is int and value > most:
                    case.body[name] = most  # thousands of samples are slow, not wrong
            if case.body.get("max_tokens") is None:  # chat would go on to the end of the context
                case.body["max_tokens"] = 20
        if isinstance(case.body, dict) and case.path == RESPONSES:
            value = case.body.get("max_output_tokens")
            if value is None or (type(value) is int and value > 20):
                case.body["max_output_tokens"] = 20
        if fits and isinstance(case.body, dict) and next(cases) % 5 == 0:
            # Few sets of fifty fields agree with each other, and few conversations have roles in an order that
            # means something: some requests have the common ones alone, and a plain text.
            body = {name: value for name, value in case.body.items() if name in COMMON}
            case.body = body | {name: PLAIN[name] for name in body.keys() & PLAIN.keys()}
        response = case.call(base_url=server.url, timeout=30)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    attack()
    if operation.method == "post":
        assert bool(statuses[200]) == fits, statuses  # it went deeper than the first check


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
        (RESPONSES, {"input": "x", "max_output_tokens": 16}),
    ],
)
def test_events_of_streams_are_what_the_document_says(
    server: Any, path: str, body: dict[str, Any]
) -> None:
    (operation,) = (one for one in OPERATIONS if one.path == path)
    case = operation.Case(body={**body, "stream": True}, media_type="application/json")
    response = case.call(base_url=server.url, timeout=30)
    assert response.status_code == 200
    assert response.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(response, checks=[response_schema_conformance])


def test_the_document_names_every_route(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    seen = set(http.get("/metrics").text.splitlines())
    assert seen
    for path, operations in paths.items():
        for method in operations:
            url = path.replace("{model}", "null")
            assert http.request(method, url, json={}).status_code in (200, 400), path


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2, "echo": True, "return_token_ids": True, "n": 2},
        {"prompt_logprobs": 1, "include_metrics": True},
        {"stop": "qui"},
        {"return_tokens_as_token_ids": True, "logprobs": 0},
    ],
)
def test_answers_are_what_the_document_says(http: httpx.Client, fields: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = {"stream": True, "stream_options": options}
    one = http.post(COMPLETIONS, json={"prompt": "x", **fields})
    msgspec.json.decode(one.content, type=answers.Completion)
    if "prompt_logprobs" not in fields:
        events = http.post(COMPLETIONS, json={"prompt": "x", **fields, **stream}).text
        for event in events.split("\n\n")[:-2]:
            msgspec.json.decode(event.removeprefix("data: "), type=answers.Completion)
    talk: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    talk |= {name: value for name, value in fields.items() if name != "echo"}
    if "logprobs" in fields:
        talk |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    whole = http.post(CHAT, json=talk)
    msgspec.json.decode(whole.content, type=answers.ChatCompletion)
    if "prompt_logprobs" not in fields:
        for event in http.post(CHAT, json={**talk, **stream}).text.split("\n\n")[:-2]:
            msgspec.json.decode(event.removeprefix("data: "), type=answers.ChatCompletionChunk)
