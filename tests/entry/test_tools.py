"""Tools over HTTP, as OpenAI's client uses them; the null engine writes what the test dictates."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

PARAMETERS = {"type": "object", "properties": {"note": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock"}},
]
ARGUMENTS = '{"wd":23,"sd":0.8,"injection":"ZSJB39","note":"a}\\"{é\\u00e9 🐌","n":{"x":[1,-2.5e3,null,{}]}}'


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>␤{{"name": "{name}", "arguments": {arguments}}}␤</tool_call>'


def say(text: str) -> Any:
    return [{"role": "user", "content": f"say:{text}"}]


@pytest.fixture(scope="module")
def client(tool_server: Any) -> openai.OpenAI:
    made: openai.OpenAI = tool_server.client()
    return made


def chat(client: openai.OpenAI, text: str, **options: Any) -> Any:
    values = {"model": "null", "messages": say(text), "tools": TOOLS}
    return client.chat.completions.create(**{**values, **options})


def streamed(client: openai.OpenAI, text: str, **options: Any) -> list[dict[str, Any]]:
    """Each choice's deltas, joined, with how many pieces the arguments came in."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chat(client, text, stream=True, **options):
        for choice in chunk.choices:
            one = found.setdefault(
                choice.index, {"content": "", "calls": [], "pieces": 0, "reasoning": ""}
            )
            one["content"] += choice.delta.content or ""
            one["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for delta in choice.delta.tool_calls or ():
                if delta.id is not None:  # the first has id, type and name, and no arguments
                    assert (delta.index, delta.type) == (len(one["calls"]), "function")
                    assert delta.function.name and delta.function.arguments == ""
                    one["calls"].append([delta.id, delta.function.name, ""])
                else:
                    assert delta.type is None and delta.function.name is None
                    one["calls"][delta.index][2] += delta.function.arguments
                    one["pieces"] += 1
            if choice.finish_reason:
                one["finish"] = choice.finish_reason
    return [found[i] for i in sorted(found)]


def test_arguments_streamed_join_to_the_whole_ones(client: openai.OpenAI) -> None:
    text = f"Sure.␤{call_text('weather', ARGUMENTS)}␤{call_text('clock', '{}')}"
    choice = chat(client, text).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Sure.\n"
    calls = choice.message.tool_calls
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        ("weather", ARGUMENTS),
        ("clock", "{}"),
    ]
    assert json.loads(calls[0].function.arguments)["note"] == 'a}"{éé 🐌'
    assert len({c.id for c in calls}) == 2
    [stream] = streamed(client, text)
    assert [call[1:] for call in stream["calls"]] == [["weather", ARGUMENTS], ["clock", "{}"]]
    assert (stream["content"], stream["finish"]) == ("Sure.\n", "tool_calls")
    assert stream["pieces"] > 5  # they came as they were written


def test_only_calls_have_no_content(client: openai.OpenAI) -> None:
    message = chat(client, call_text("clock", "{}")).choices[0].message
    assert message.content is None and message.tool_calls[0].function.arguments == "{}"
    bare = chat(client, '<tool_call>{"name": "clock"}</tool_call>').choices[0].message
    assert bare.tool_calls[0].function.arguments == "{}"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>nonsense</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "a <b> and <tool_cal and <tool_call",
        '<tool_call>{"name": "weather", "arguments": 5}</tool_call> then',
    ],
)
def test_what_is_no_call_is_content(client: openai.OpenAI, text: str) -> None:
    choice = chat(client, text).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text, "stop")
    assert choice.message.tool_calls is None
    [stream] = streamed(client, text)
    assert (stream["content"], stream["calls"], stream["finish"]) == (text, [], "stop")


def test_broken_arguments(client: openai.OpenAI) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"a": }}</tool_call>'
    choice = chat(client, text).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    assert choice.finish_reason == "stop"
    [stream] = streamed(client, text)  # the call was told of before it broke
    assert stream["content"] == "}}</tool_call>" and stream["finish"] == "stop"


def test_a_call_that_is_cut_keeps_what_there_is(client: openai.OpenAI) -> None:
    text = call_text("weather", '{"note": "long"}')
    limit = text.index("ong")
    choice = chat(client, text, max_tokens=limit).choices[0]
    assert choice.finish_reason == "length" and choice.message.content is None
    assert choice.message.tool_calls[0].function.arguments == '{"note": "l'
    [stream] = streamed(client, text, max_tokens=limit)
    assert stream["calls"][0][2] == '{"note": "l' and stream["finish"] == "length"


def test_concurrent_streams_never_mix(client: openai.OpenAI) -> None:
    def one(i: int) -> dict[str, Any]:
        arguments = json.dumps({"note": f"{i} " * 40, "n": i})
        [found] = streamed(client, call_text("weather" if i % 2 else "clock", arguments))
        return {**found, "wanted": arguments, "i": i}

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(one, range(8)):
            name = "weather" if found["i"] % 2 else "clock"
            assert [call[1:] for call in found["calls"]] == [[name, found["wanted"]]]
            assert (found["content"], found["finish"]) == ("", "tool_calls")


def test_samples_have_calls_of_their_own(client: openai.OpenAI) -> None:
    text = call_text("weather", ARGUMENTS)
    whole = chat(client, text, n=3)
    assert [c.message.tool_calls[0].function.arguments for c in whole.choices] == [ARGUMENTS] * 3
    found = streamed(client, text, n=3)
    assert [one["calls"][0][2] for one in found] == [ARGUMENTS] * 3
    assert len({one["calls"][0][0] for one in found}) == 3


def test_at_most_one_call(client: openai.OpenAI) -> None:
    text = call_text("weather", "{}") + call_text("clock", "{}")
    message = chat(client, text, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather"]
    [stream] = streamed(client, text, parallel_tool_calls=False)
    assert [call[1] for call in stream["calls"]] == ["weather"]


def test_none_calls_nothing_and_tells_of_nothing(client: openai.OpenAI) -> None:
    text = call_text("weather", "{}")
    found = chat(client, text, tool_choice="none")
    assert found.choices[0].message.content == text.replace("␤", "\n")
    assert found.usage.prompt_tokens < chat(client, text).usage.prompt_tokens


def test_logprobs_and_ids_cover_every_token(client: openai.OpenAI) -> None:
    text = call_text("weather", '{"note": "x"}')
    extra: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    tokens, ids = 0, 0
    for chunk in chat(client, text, stream=True, **extra):
        for choice in chunk.choices:
            tokens += len(choice.logprobs.content) if choice.logprobs else 0
            ids += len(getattr(choice, "token_ids", None) or ())
    assert tokens == ids == len(text.replace("␤", "\n").encode()) + 1


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    text = call_text("weather", ARGUMENTS)
    with client.chat.completions.stream(model="null", messages=say(text), tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == ARGUMENTS


CALLS: Any = [
    {"role": "user", "content": "What time is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"z":"é"}'}}
        ],
    },
]


def rendered(server: Any, body: dict[str, Any]) -> str:
    with server.http() as http:
        answer = http.post("/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        text: str = http.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()[
            "prompt"
        ]
        return text


def test_calls_and_results_are_rendered(tool_server: Any, client: openai.OpenAI) -> None:
    result = {"role": "tool", "tool_call_id": "a", "content": "noon"}
    for generation_prompt in (True, False):
        body = {"messages": CALLS, "tools": TOOLS, "add_generation_prompt": generation_prompt}
        text = rendered(tool_server, body)
        assert '<tool_call>{"name": "clock", "arguments": {"z": "é"}}</tool_call>' in text
        assert text.startswith("tools: [") and text.endswith("assistant: ") == generation_prompt
    assert "tool: noon\n" in rendered(tool_server, {"messages": [*CALLS, result]})
    begun = [*CALLS, result, {"role": "assistant", "content": "It is"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(tool_server, {"messages": begun, **options}).endswith("assistant: It is")
    again = client.chat.completions.create(
        model="null", messages=[*CALLS, result, *say("done")], tools=TOOLS
    )
    assert again.choices[0].message.content == "done"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"extra_body": {"add_generation_prompt": True, "continue_final_message": True}}, "continue_final_message", "add_generation_prompt=false"),
        ({"messages": CALLS, "extra_body": {"continue_final_message": True}}, "messages", "tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "id of the call"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role", "role tool"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": CALLS[1]["tool_calls"]}]}, "messages[0].tool_calls", "assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]}, "messages[0].tool_calls[0].function.arguments", "JSON object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]}, "messages[0].tool_calls[0]", "function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "only functions"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "object"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "paramters": {}}}]}, "tools[0].function.paramters", "did you mean"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools[0].function.parameters", "names"),
        ({"tools": TOOLS + TOOLS[:1]}, "tools", "two tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "any"}, "tool_choice", "required"),
        ({"tool_choice": {"type": "function", "function": {"name": "wether"}}}, "tool_choice", "did you mean"),
        ({"tool_choice": "required", "tools": [TOOLS[1], {"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"type": "intt"}}}}}]}, "tools[1].function.parameters", "intt"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_a_400(
    client: openai.OpenAI, body: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "x", **body)
    assert (caught.value.param, words in caught.value.message) == (param, True), caught.value


def test_a_template_without_tools_refuses(server: Any) -> None:
    for body, param in (
        ({"messages": say("x"), "tools": TOOLS}, "tools"),
        ({"messages": CALLS}, "messages[1].tool_calls"),
    ):
        with server.http() as http:
            error = http.post("/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == param, error


def test_a_template_without_tools_and_the_fallback_prompt(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_OPTIONS='{"fallback_tool_prompt": true}')
    server.wait_ready(60)
    result = {"role": "tool", "tool_call_id": "a", "content": "noon"}
    text = rendered(server, {"messages": [*CALLS, result, result], "tools": TOOLS})
    assert text.startswith("<s>system: You may call functions") and '"name": "weather"' in text
    assert '<tool_call>\n{"name": "clock", "arguments": {"z":"é"}}\n</tool_call>' in text
    assert text.count("user: <tool_response>\nnoon") == 1 and text.count("noon") == 2
    client = server.client()
    message = chat(client, call_text("weather", ARGUMENTS)).choices[0].message
    assert message.tool_calls[0].function.arguments == ARGUMENTS
    banner = "".join(server.process.stdout.readline() for _ in range(6))
    assert (
        "tools: calls in the form of hermes (the built-in system prompt tells of tools)" in banner
    )


@pytest.mark.parametrize(
    ("parser", "special", "text"),
    [
        ("mistral", "[TOOL_CALLS]", '[TOOL_CALLS][{"name": "weather", "arguments": {"note": "é"}}, {"name": "clock", "arguments": {}}]'),
        ("llama3", "<|python_tag|>", '<|python_tag|>{"name": "weather", "parameters": {"note": "é"}}; {"name": "clock"}'),
        ("pythonic", "", "[weather(note='é'), clock()]"),
        ("deepseek", "", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"note": "é"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    ],
)  # fmt: skip
def test_other_families(
    own_server: Any, tool_template: str, parser: str, special: str, text: str
) -> None:
    server = own_server(
        NULL_ENGINE_TEMPLATE=tool_template,
        NULL_ENGINE_SPECIAL=special,
        NULL_ENGINE_OPTIONS=json.dumps({"tool_call_parser": parser}),
    )
    server.wait_ready(60)
    client = server.client()
    message = chat(client, text).choices[0].message
    expected = [("weather", '{"note": "é"}'), ("clock", "{}")]
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls]
    assert (calls, message.content) == (expected, None)
    [stream] = streamed(client, text)
    assert ([tuple(c[1:]) for c in stream["calls"]], stream["content"]) == (expected, "")
    if parser == "mistral":
        assert all(len(c.id) == 9 and c.id.isalnum() for c in message.tool_calls)


def test_an_unknown_parser_ends_the_start(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_OPTIONS='{"tool_call_parser": "hermess"}')
    assert server.process.wait(60) != 0
    assert "did you mean 'hermes'" in server.stderr.read_text()
