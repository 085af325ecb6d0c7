"""Reasoning over HTTP, as OpenAI's client sees it; the null engine writes what the test dictates."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

JSON = '{"answer":42}'
TOOLS: Any = [{"type": "function", "function": {"name": "clock"}}]


@pytest.fixture(scope="module")
def client(tool_server: Any) -> openai.OpenAI:
    made: openai.OpenAI = tool_server.client()
    return made


def both(client: openai.OpenAI, text: str, thinking: bool | None, **options: Any) -> Any:
    """(reasoning, content, finish reason, tokens of reasoning), the same streamed and not."""
    extra: dict[str, Any] = dict(options.pop("extra_body", {}))
    if thinking is not None:
        extra["chat_template_kwargs"] = {"enable_thinking": thinking}
    values: Any = {
        "model": "null",
        "messages": [{"role": "user", "content": f"say:{text}"}],
        "extra_body": extra,
        **options,
    }
    whole = client.chat.completions.create(**values)
    choice = whole.choices[0]
    reasoning = getattr(choice.message, "reasoning", None)
    details = whole.usage.completion_tokens_details
    spent = None if details is None else details.reasoning_tokens
    parts = {"reasoning": "", "content": ""}
    chunks = client.chat.completions.create(
        **values, stream=True, stream_options={"include_usage": True}
    )
    finish, usage = None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for one in chunk.choices:
            for name in parts:
                parts[name] += getattr(one.delta, name, None) or ""
            finish = one.finish_reason or finish
    assert parts == {"reasoning": reasoning or "", "content": choice.message.content or ""}
    assert finish == choice.finish_reason and usage == whole.usage
    return reasoning, choice.message.content, choice.finish_reason, spent


def test_switched_off_everything_is_content(client: openai.OpenAI) -> None:
    assert both(client, JSON, False) == (None, JSON, "stop", None)
    text = f"hm</think>{JSON}"
    assert both(client, text, False) == (None, text, "stop", None)


def test_cut_inside_there_is_no_content(client: openai.OpenAI) -> None:
    assert both(client, JSON, True, max_tokens=8) == (JSON[:8], None, "length", 8)
    # A tag that is only half there is text.
    assert both(client, f"hm</think>{JSON}", True, max_tokens=5) == ("hm</t", None, "length", 5)


def test_opened_by_the_template(client: openai.OpenAI) -> None:
    found = both(client, f"␤Let me see: <b>␤␤</think>␤␤{JSON}", True)
    assert found == ("Let me see: <b>", JSON, "stop", len("\nLet me see: <b>\n\n</think>"))


def test_opened_by_the_model(client: openai.OpenAI) -> None:
    found = both(client, f"<think>␤é␤</think>␤{JSON}", None)
    assert found == ("é", JSON, "stop", len("<think>\né\n</think>".encode()))
    assert both(client, JSON, None) == (None, JSON, "stop", 0)
    assert both(client, "<thin air", None) == (None, "<thin air", "stop", 0)
    assert both(client, "<think></think>x", None)[:3] == (None, "x", "stop")


def test_reasoning_left_out(client: openai.OpenAI) -> None:
    found = both(client, f"hm</think>{JSON}", True, extra_body={"include_reasoning": False})
    assert found == (None, JSON, "stop", 10)


def test_samples_reason_for_themselves(client: openai.OpenAI) -> None:
    values: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    found = client.chat.completions.create(
        model="null",
        messages=[{"role": "user", "content": "say:ab</think>c"}],
        n=3,
        extra_body=values,
    )
    assert [c.message.reasoning for c in found.choices] == ["ab"] * 3  # type: ignore[attr-defined]
    assert [c.message.content for c in found.choices] == ["c"] * 3
    details = found.usage and found.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens == 30


def test_a_call_behind_reasoning(client: openai.OpenAI) -> None:
    call = '<tool_call>{"name": "clock", "arguments": {"a": 1}}</tool_call>'
    asked: Any = {
        "model": "null",
        "messages": [{"role": "user", "content": f"say:I may {call}</think>␤{call}"}],
        "tools": TOOLS,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    choice = client.chat.completions.create(**asked).choices[0]
    message: Any = choice.message
    assert (message.reasoning, message.content) == (f"I may {call}", None)
    assert [c.function.arguments for c in message.tool_calls] == ['{"a": 1}']
    assert choice.finish_reason == "tool_calls"


def test_a_continued_message(client: openai.OpenAI) -> None:
    def answer(begun: str) -> Any:
        messages: Any = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": begun},
        ]
        options = {"continue_final_message": True, "add_generation_prompt": False}
        found = client.chat.completions.create(model="null", messages=messages, extra_body=options)
        message: Any = found.choices[0].message
        return getattr(message, "reasoning", None), message.content

    assert answer("<think>so say:far</think>x") == (
        None,
        "far</think>x",
    )  # the prompt has closed it
    assert answer("<think>so say:far") == ("far", None)
    assert answer("The say:end") == (None, "end")


def test_a_server_without_a_parser(server: Any) -> None:
    text = f"<think>x</think>{JSON}"
    assert both(server.client(), text, None) == (None, text, "stop", None)


def test_special_tokens_as_tags(own_server: Any, tool_template: str) -> None:
    server = own_server(
        NULL_ENGINE_TEMPLATE=tool_template,
        NULL_ENGINE_SPECIAL="<think> </think> <|other|>",
        NULL_ENGINE_OPTIONS=json.dumps({"reasoning_parser": "deepseek_r1"}),
    )
    server.wait_ready(60)
    found = both(server.client(), "<think>a<|other|>b</think>c<|other|>d", None)
    assert found == ("ab", "cd", "stop", 5)
    assert "reasoning: in the form of deepseek_r1 (as asked for)" in "".join(
        server.process.stdout.readline() for _ in range(7)
    )
