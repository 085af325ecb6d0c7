"""What the OpenAI client gets from a served process."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

SAY = "say:héllo 🙂 you"
TEXT = "héllo 🙂 you"
USER: Any = [{"role": "user", "content": SAY}]


def chat(client: openai.OpenAI, **options: Any) -> Any:
    options = {"model": "null", "messages": USER, **options}
    return client.chat.completions.create(**options)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    options = {"model": "null", "prompt": SAY, "max_tokens": 100, **options}
    return client.completions.create(**options)


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["null", "org/name"]
    assert client.models.retrieve("org/name").id == "org/name"  # requested as org%2Fname
    with pytest.raises(openai.NotFoundError, match="null, org/name"):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage.completion_tokens == len(TEXT.encode()) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 16


def test_chat_stream_has_the_shape_clients_rely_on(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, n=2, stream_options={"include_usage": True}))
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    usage = chunks.pop()
    assert usage.choices == [] and usage.usage.completion_tokens == 2 * (len(TEXT.encode()) + 1)
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert "".join(c.delta.content or "" for c in mine) == TEXT
        assert "\ufffd" not in "".join(c.delta.content or "" for c in mine)
        assert mine[-1].finish_reason == "stop" and mine[-1].delta.content is None
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
    assert all(c.usage is None for c in chunks)


def test_the_stream_on_the_wire(http: httpx.Client) -> None:
    body = {"messages": USER, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        assert "usage" not in chunk and len(chunk["choices"]) == 1


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": SAY, "stream": True, "stream_options": options}
    text = http.post("/v1/completions", json=body).text
    chunks = [json.loads(e[6:]) for e in text.split("\n\n") if e and "[DONE]" not in e]
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[0] >= 1


def test_chat_logprobs_streamed_equal_those_at_once(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "seed": 1}
    whole = chat(client, **options).choices[0].logprobs.content
    streamed = []
    for chunk in chat(client, stream=True, **options):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == whole
    assert b"".join(bytes(e.bytes) for e in whole) == TEXT.encode() + b"</s>"
    assert all(len(e.top_logprobs) == 3 for e in whole)
    assert whole[1].token == "bytes:\\xc3"  # half of é
    assert min(t.logprob for e in whole for t in e.top_logprobs) == -9999.0


def test_zero_logprobs_are_not_none(client: openai.OpenAI) -> None:
    legacy = complete(client, logprobs=0).choices[0].logprobs
    assert len(legacy.tokens) == len(TEXT.encode()) + 1
    assert all(p == -0.5 for p in legacy.token_logprobs)
    assert all(top == {} for top in legacy.top_logprobs)
    for extra in ({}, {"top_logprobs": 0}):
        content = chat(client, logprobs=True, **extra).choices[0].logprobs.content
        assert content[0].logprob == -0.5 and content[0].top_logprobs == []
    assert chat(client).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, top_logprobs=3)
    assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"echo": True, "logprobs": 2, "n": 2}
    answer = complete(client, stream=stream, **options)
    if stream:
        chunks = [c.choices[0] for c in answer if c.choices[0].index == 1]
        text = "".join(c.text for c in chunks)
        parts = [c.logprobs for c in chunks if c.logprobs]
        lists = {
            name: [x for p in parts for x in getattr(p, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
    else:
        choice = answer.choices[1]
        text, lists = choice.text, choice.logprobs.model_dump()
    assert text == SAY + TEXT
    count = 1 + len(SAY.encode()) + len(TEXT.encode()) + 1
    assert all(len(lists[name]) == count for name in lists), {n: len(v) for n, v in lists.items()}
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert lists["tokens"][0] == "<s>"
    assert lists["text_offset"][1:6] == [0, 1, 2, 3, 4]
    assert lists["text_offset"][-1] == len(SAY + TEXT)
    assert -9999.0 in lists["top_logprobs"][1].values() or lists["top_logprobs"][1]


def test_echo_alone(client: openai.OpenAI) -> None:
    answer = complete(client, echo=True, max_tokens=0)
    assert answer.choices[0].text == SAY
    assert answer.usage.completion_tokens == 0


def test_prompts_of_all_forms(client: openai.OpenAI) -> None:
    ids = [1, *(3 + b for b in b"say:ok")]
    assert complete(client, prompt=ids).choices[0].text == "ok"
    answer = complete(client, prompt=["say:a", "say:b"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate("aabb"))
    answer = complete(client, prompt=[ids, ids], stream=True)
    texts: dict[int, str] = {}
    for chunk in answer:
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: "ok", 1: "ok"}
    assert complete(client, prompt=["say:a"] * 3).usage.prompt_tokens == 3 * 6


def test_completions_stop_at_16_tokens_and_chat_goes_on(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="null", prompt="x")
    assert answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"
    talk: Any = [{"role": "user", "content": "x"}]
    answer = chat(client, messages=talk, stop=["lazy"])
    assert answer.choices[0].message.content.endswith("over the ")
    answer = chat(client, messages=talk, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stop", ["own f", ["zzz", "own f"]])
def test_stop_strings(client: openai.OpenAI, stop: Any) -> None:
    answer = complete(client, prompt="x", stop=stop)
    assert answer.choices[0].text == "The quick br"
    assert answer.choices[0].stop_reason == "own f"
    assert answer.usage.completion_tokens == len("The quick brown f")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "extra", [{"return_token_ids": True}, {"return_tokens_as_token_ids": True, "logprobs": 1}]
)
def test_stop_strings_on_every_route(client: openai.OpenAI, stream: bool, extra: Any) -> None:
    """Asking for ids changes nothing of where the text ends, nor which tokens are counted."""
    body: Any = {"prompt": "x", "stop": ["own f"], "extra_body": extra}
    if stream:
        chunks = list(complete(client, stream=True, **body))
        text = "".join(c.choices[0].text for c in chunks)
        ids = [t for c in chunks for t in getattr(c.choices[0], "token_ids", None) or ()]
        reason = chunks[-1].choices[0].stop_reason
    else:
        choice = complete(client, **body).choices[0]
        text, ids, reason = (
            choice.text,
            getattr(choice, "token_ids", None) or [],
            choice.stop_reason,
        )
    assert (text, reason) == ("The quick br", "own f")
    if "return_token_ids" in extra:
        assert len(ids) == len("The quick brown f")


def test_stop_strings_hold_back_only_what_could_match(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 20, "stop": "\n\nObservation:", "stream": True}
    events = http.post("/v1/completions", json=body).text.split("\n\n")
    first = json.loads(events[0][6:])["choices"][0]
    assert first["text"].startswith("T")


def test_vllm_extras(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True, "min_tokens": 1, "top_k": 5, "ignore_eos": True}
    answer = chat(client, max_tokens=4, extra_body=extra)
    choice = answer.choices[0]
    assert len(choice.token_ids) == 4 and answer.prompt_token_ids[0] == 1
    answer = complete(
        client, logprobs=1, max_tokens=2, extra_body={"return_tokens_as_token_ids": True}
    )
    assert answer.choices[0].logprobs.tokens[0] == f"token_id:{3 + ord('h')}"
    answer = chat(client, extra_body={"prompt_logprobs": 1})
    assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) > 10
    answer = chat(client, extra_body={"cache_salt": "mine"})
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_continues_a_message(client: openai.OpenAI) -> None:
    talk: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "say:more"}]
    extra = {"continue_final_message": True}
    assert chat(client, messages=talk, extra_body=extra).choices[0].message.content == "more"


def test_messages_as_clients_send_them_back(client: openai.OpenAI) -> None:
    first = chat(client).choices[0].message
    parts = [{"type": "text", "text": "again"}, {"type": "text", "text": SAY}]
    talk: Any = [
        {"role": "developer", "content": "be brief"},
        *USER,
        first.model_dump(),
        {"role": "user", "content": parts, "name": "me"},
    ]
    assert chat(client, messages=talk).choices[0].message.content == TEXT


def test_the_clients_own_helpers(server: Any) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            create = client.chat.completions.create
            answers = await asyncio.gather(
                *(create(model="null", messages=USER, stream=bool(i % 2)) for i in range(6))
            )
            texts = []
            for answer in answers:
                if hasattr(answer, "choices"):
                    texts.append(answer.choices[0].message.content)
                else:
                    texts.append("".join([c.choices[0].delta.content or "" async for c in answer]))
            return texts

    assert asyncio.run(ask()) == [TEXT] * 6
    client = server.client()
    with client.chat.completions.stream(model="null", messages=USER) as stream:
        assert stream.get_final_completion().choices[0].message.content == TEXT
    raw = client.chat.completions.with_raw_response.create(model="null", messages=USER)
    assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content == TEXT


def test_many_at_once(client: openai.OpenAI) -> None:
    def one(number: int) -> str:
        talk: Any = [{"role": "user", "content": f"say:{'ab' * number}"}]
        if number % 2:
            return str(chat(client, messages=talk).choices[0].message.content)
        chunks = chat(client, messages=talk, stream=True)
        return "".join(c.choices[0].delta.content or "" for c in chunks)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(1, 41))) == ["ab" * n for n in range(1, 41)]


def test_tokenize_and_detokenize(http: httpx.Client, client: openai.OpenAI) -> None:
    """/tokenize shows the ids that chat uses."""
    got = http.post("/tokenize", json={"messages": USER, "return_token_strs": True}).json()
    assert got["count"] == len(got["tokens"]) == chat(client).usage.prompt_tokens
    assert got["tokens"].count(1) == 1 and got["token_strs"][0] == "<s>"
    assert got["max_model_len"] == 4096
    plain = http.post("/tokenize", json={"prompt": "ab"}).json()["tokens"]
    assert plain == [1, 100, 101]
    bare = http.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False}).json()
    assert bare["tokens"] == [100, 101]
    assert http.post("/detokenize", json={"tokens": plain}).json() == {"prompt": "<s>ab"}


def test_health_and_version(http: httpx.Client) -> None:
    assert http.get("/health").status_code == http.get("/ping").status_code == 200
    assert http.get("/version").json()["version"]


def test_request_ids_are_labels_only(http: httpx.Client) -> None:
    """Two requests may bring the same id, and each gets it back."""
    body = {"prompt": "say:one", "n": 2, "request_id": "same"}

    def one(_: int) -> httpx.Response:
        return http.post("/v1/completions", json=body, headers={"x-request-id": "same"})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    assert all(a.headers["x-request-id"] == "same" for a in answers)
    assert all([c["text"] for c in a.json()["choices"]] == ["one", "one"] for a in answers)
    assert len({a.json()["id"] for a in answers}) == 8
    odd = http.get("/version", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert len(odd) == 32  # not fit to be echoed
