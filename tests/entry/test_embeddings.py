"""POST /v1/embeddings and `LLM.embed`, around the null engine: a prompt's embedding is its first token ids."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from null_engine import BOS, NullEngine, byte_tokenizer, load
from scrape import numbers

from octavo import LLM, AsyncLLM, PoolingParams
from octavo.core.config import EngineConfig
from octavo.core.entry.batch_file import run_batch
from octavo.core.entry.embedding import EmbeddingFailed
from octavo.core.entry.server import schema
from octavo.core.params import ParamError

PATH = "/v1/embeddings"


def wanted(text: str | list[int], size: int | None = None) -> np.ndarray[Any, Any]:
    ids = byte_tokenizer().encode(text) if isinstance(text, str) else text
    row = np.zeros(8, np.float32)
    row[: len(ids)] = ids[:8]
    row = row[:size]
    return row / np.linalg.norm(row) if size else row


def test_the_official_client_gets_what_was_computed(client: openai.OpenAI) -> None:
    """It asks for base64 unless told otherwise, and unpacks it."""
    texts = ["hello world", "x", "ünïcode"]
    packed = client.embeddings.create(model="null", input=texts, user="me")
    plain = client.embeddings.create(model="null", input=texts, encoding_format="float")
    for answer in (packed, plain):
        assert [item.index for item in answer.data] == [0, 1, 2]
        assert answer.model == "null" and answer.object == "list"
        for text, item in zip(texts, answer.data, strict=True):
            assert item.embedding == wanted(text).tolist()
        tokens = sum(len(byte_tokenizer().encode(text)) for text in texts)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
    one = client.embeddings.create(model="null", input="abc")
    assert one.data[0].embedding == wanted("abc").tolist()


def test_base64_holds_the_numbers_bit_for_bit(http: httpx.Client) -> None:
    body = {"input": "the same", "dimensions": 4}
    plain = http.post(PATH, json=body).json()["data"][0]["embedding"]
    packed = http.post(PATH, json={**body, "encoding_format": "base64"}).json()
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == plain
    np.testing.assert_allclose(plain, wanted("the same", 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ("abc", ["abc"]),
        (["abc", "d"], ["abc", "d"]),
        ([BOS, 5, 6], [[BOS, 5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_forms_of_input(http: httpx.Client, given: Any, rows: list[Any]) -> None:
    answer = http.post(PATH, json={"input": given})
    assert answer.status_code == 200, answer.text
    found = msgspec.json.decode(answer.content, type=schema.EmbeddingList)
    assert [item.embedding for item in found.data] == [wanted(row).tolist() for row in rows]


def test_many_inputs_keep_their_order(http: httpx.Client) -> None:
    texts = [f"{i} of many" for i in range(2048)]
    data = http.post(PATH, json={"input": texts}).json()["data"]
    assert [item["embedding"] for item in data] == [wanted(text).tolist() for text in texts]
    refused = http.post(PATH, json={"input": [*texts, "one more"]})
    assert refused.status_code == 400
    assert "2049 items; one request may have 2048" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "input must be"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[1], []]}, "input[1]", "empty"),
        ({"input": ["a", 1]}, "input", "input must be"),
        ({"input": {"text": "a"}}, "input", "input must be"),
        ({"input": None}, "input", "input must be"),
        ({"input": [999999]}, "input", "0 to 258"),
        ({"input": [-1]}, "input", "0 to 258"),
        ({"input": [[1], [999999]]}, "input[1]", "0 to 258"),
        ({"input": "x" * 300}, "input", "at most 256"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "'int8'"),
        ({"input": "x", "dimensions": 0}, "dimensions", "above 0"),
        ({"input": "x", "dimensions": 3}, "dimensions", "2, 4 or 8"),
        ({"input": "x", "dimensions": 9}, "dimensions", "2, 4 or 8"),
        ({"input": "x", "dimension": 4}, "dimension", "did you mean 'dimensions'"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "x", "truncate_prompt_tokens": 300}, "truncate_prompt_tokens", "256"),
        ({"input": "x", "cache_salt": ""}, "cache_salt", "1 to 128"),
        ({"input": "x", "priority": 2**40}, "priority", "32 bits"),
        ({"input": "refuse me"}, "prompt", "KV blocks"),
    ],
)
def test_what_cannot_be_embedded(
    http: httpx.Client, body: dict[str, Any], param: str, words: str
) -> None:
    answer = http.post(PATH, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == param and words in error["message"], error


def test_another_model_and_a_long_input_that_is_cut(http: httpx.Client) -> None:
    assert http.post(PATH, json={"input": "x", "model": "other"}).status_code == 404
    cut = http.post(PATH, json={"input": "abcdefgh" * 50, "truncate_prompt_tokens": -1})
    assert cut.json()["usage"]["prompt_tokens"] == 256
    few = http.post(PATH, json={"input": "abcdefgh", "truncate_prompt_tokens": 3}).json()
    assert few["data"][0]["embedding"] == wanted("ab").tolist()  # behind BOS
    bare = http.post(PATH, json={"input": "ab", "add_special_tokens": False}).json()
    assert bare["data"][0]["embedding"] == wanted(byte_tokenizer().encode("ab", False)).tolist()


def test_one_that_fails_fails_the_request(own_server: Any) -> None:
    server = own_server()
    server.wait_ready()
    with server.http() as http:
        answer = http.post(PATH, json={"input": ["fine", "embed nothing"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "embedding_failed")
        assert http.post(PATH, json={"input": "fine"}).status_code == 200


def test_they_are_counted(http: httpx.Client) -> None:
    before = numbers(http)
    assert http.post(PATH, json={"input": ["a", "b", "c"]}).status_code == 200
    after = numbers(http)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert gained("embeddings_total") == 3 and gained("requests_received_total") == 3
    assert gained('request_success_total{finished_reason="stop"}') == 3
    assert gained('http_responses_total{path="/v1/embeddings",status="200"}') == 1
    assert gained("prompt_tokens_total") == 6 and gained("generation_tokens_total") == 0


def test_what_the_model_can_is_told(http: httpx.Client) -> None:
    model = http.get("/v1/capabilities").json()
    assert model["model"]["tasks"] == ["generate", "embed"]
    assert model["model"]["embedding"]["pooling"] == "mean"
    assert "dimensions" in model["parameters"][PATH]


def test_a_model_that_only_embeds_refuses_to_talk(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_TASKS="embed")
    server.wait_ready()
    with server.http() as http:
        talk = {"messages": [{"role": "user", "content": "x"}]}
        for path, body in (
            ("/v1/chat/completions", talk),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/responses", {"input": "x"}),
        ):
            answer = http.post(path, json={"model": "null", **body})
            assert answer.status_code == 400, path
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("model", "unsupported")
            assert "told not to" in error["message"]
        assert http.post(PATH, json={"input": "x"}).status_code == 200


def test_a_model_that_only_talks_refuses_to_embed(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_TASKS="generate")
    server.wait_ready()
    with server.http() as http:
        answer = http.post(PATH, json={"input": "x"})
        assert answer.status_code == 400 and "told not to" in answer.json()["error"]["message"]


def test_batch_lines() -> None:
    def line(name: str, **body: Any) -> bytes:
        return json.dumps({"custom_id": name, "url": PATH, "body": body}).encode()

    written: list[bytes] = []
    config = EngineConfig(model="null", max_model_len=4096, load_progress=False)
    lines = [line("a", input="abc"), line("b", input="")]
    counts = asyncio.run(
        run_batch(config, lines, written.append, factory="null_engine:build", loader=load)
    )
    assert (counts.completed, counts.failed, counts.tokens) == (1, 1, 0)
    answers = {each["custom_id"]: each["response"] for each in map(json.loads, written)}
    assert answers["a"]["body"]["data"][0]["embedding"] == wanted("abc").tolist()
    assert answers["b"]["status_code"] == 400


@pytest.fixture
def llm() -> LLM:
    config = EngineConfig(max_model_len=512)
    return LLM.from_parts(config, load(config), NullEngine(config))


def test_llm_embeds_any_form_of_prompt(llm: LLM) -> None:
    prompts = ["abc", {"prompt": "d"}, {"prompt_token_ids": [5, 6]}, llm.tokenize("efg")]
    outputs = llm.embed(prompts)
    rows = [wanted("abc"), wanted("d"), wanted([5, 6]), wanted("efg")]
    assert [o.outputs.embedding for o in outputs] == [row.tolist() for row in rows]
    assert outputs[0].prompt == "abc" and outputs[0].prompt_token_ids[0] == BOS
    assert outputs[0].outputs.array.dtype == np.float32
    [one] = llm.embed([5, 6], PoolingParams(normalize=True))
    assert abs(np.linalg.norm(one.outputs.embedding) - 1) < 1e-6
    each = llm.embed(["a", "b"], [PoolingParams(dimensions=2), PoolingParams()], priority=[1, 0])
    assert [o.outputs.hidden_size for o in each] == [2, 8]


def test_llm_refuses_and_goes_on(llm: LLM) -> None:
    for prompts, params, word in (
        (["a"], [PoolingParams()] * 2, "2 pooling_params for 1"),
        (["a"], ["mean"], "must be PoolingParams"),
        (["x" * 400], None, "at most 256"),
    ):
        with pytest.raises(ParamError, match=word):
            llm.embed(prompts, params)  # type: ignore[arg-type]
    with pytest.raises(ParamError, match="2 priorities for 1"):
        llm.embed(["a"], priority=[1, 2])
    for wrong in ({"dimensions": -1}, {"dimensions": True}, {"normalize": 1}):
        with pytest.raises(ParamError):
            PoolingParams(**wrong)  # type: ignore[arg-type]
    with pytest.raises(EmbeddingFailed):
        llm.embed(["fine", "embed nothing"])
    assert len(llm.embed(["fine", "fine too"])) == 2


def test_async_llm_embeds_and_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULL_ENGINE_STALL_SECONDS", "0.3")

    async def body() -> None:
        config = EngineConfig(model="null", max_model_len=4096, load_progress=False)
        async with AsyncLLM.from_config(config, factory="null_engine:build", loader=load) as llm:
            texts = [f"text {i}" for i in range(40)]
            found = await asyncio.gather(*(llm.embed(text, request_id="mine") for text in texts))
            assert [o.outputs.embedding for o in found] == [wanted(t).tolist() for t in texts]
            assert found[0].request_id == "mine"
            stalled = asyncio.ensure_future(llm.embed("stall now", request_id="gone"))
            await asyncio.sleep(0.05)
            stalled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stalled
            assert llm.num_open == 0
            with pytest.raises(ParamError, match="dimensions"):
                await llm.embed("x", PoolingParams(dimensions=3))

    asyncio.run(asyncio.wait_for(body(), 60))
