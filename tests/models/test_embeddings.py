"""Embeddings of tiny random models are those of transformers, whatever shares the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from sentence_models import ENCODERS, decoder, embed, encoder, expected, numbers, randomised, save
from tiny_models import engine, greedy, make, prompt_of, reference, run, tokens_of

from octavo import LLM, PoolingParams
from octavo.core.config import ConfigError, EngineConfig
from octavo.core.entry.bench.reference_model import load_transformers
from octavo.core.entry.embedding import EmbeddingFailed
from octavo.core.entry.wiring import resolve_model
from octavo.core.loading.errors import ModelConfigError
from octavo.core.loading.tokenizer import load_tokenizer
from octavo.core.params import ParamError, RequestRefused

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
TEXTS = ["the cat sat on the mat", "a dog ran away", "unable", "red trees and blue"]


@pytest.mark.parametrize("kind", ["mean", "last", "cls"])
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_decoder_embeds_beside_what_it_generates(
    llama: tuple[Path, Any], device: str, kind: str
) -> None:
    """In chunks, with a pool so small that prompts are preempted, and once more behind cached blocks."""
    folder, model = llama
    made = engine(folder, device=device, num_kv_blocks=12, max_num_batched_tokens=3)
    assert made.info.tasks == ("generate", "embed")
    common = prompt_of(60)
    prompts = [common[:shared] + prompt_of(5, seed=shared) for shared in (60, 32, 60, 0)]
    talk = [prompt_of(10, seed=1), prompt_of(20, seed=2)]
    hits = preemptions = 0
    for again in ("", " again"):
        requests = [embed(f"{i}{again}", ids, kind) for i, ids in enumerate(prompts)]
        asked = [
            msgspec.structs.replace(greedy(f"talk {i}{again}", ids, 45), priority=-1)
            for i, ids in enumerate(talk)
        ]
        found = run(made, *asked, *requests)
        for request, ids in zip(requests, prompts, strict=True):
            [update] = found[request.id]
            assert update.finish_reason == "stop" and not update.token_ids
            got = numbers(update.embedding)
            torch.testing.assert_close(got, expected(model.model, ids, kind), **CLOSE)
            hits += update.num_cached_tokens
            assert update.timings is not None
            preemptions += update.timings.num_preemptions
        for request in asked:
            tokens = tokens_of(found[request.id])
            assert tokens == reference(model, request.prompt_token_ids, 45, tokens)[0]
    assert made.stats().kv_blocks_used == 0
    assert preemptions > 0 and (hits > 0) == (kind == "last")
    made.shutdown()


def test_prompts_are_embedded_beside_drafts(llama: tuple[Path, Any]) -> None:
    """Where others' tokens are drafted and checked, and some draw several samples or search beams."""
    folder, model = llama
    options = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    made = engine(folder, device="cpu", speculative_config=options, max_num_batched_tokens=40)
    copying = prompt_of(12) * 3
    requests = [embed(f"e{i}", prompt_of(70, seed=i), "mean") for i in range(3)]
    wide = [
        greedy("n", prompt_of(9), 8, n=2),
        greedy("b", prompt_of(9), 8, n=2, use_beam_search=True),
    ]
    found = run(made, greedy("copy", copying, 40), requests[0], *wide, *requests[1:])
    assert made.stats().drafted_tokens > 0
    tokens = tokens_of(found["copy"])
    assert tokens == reference(model, copying, 40, tokens)[0]
    for request in requests:
        wanted = expected(model.model, request.prompt_token_ids, "mean")
        torch.testing.assert_close(numbers(found[request.id][0].embedding), wanted, **CLOSE)
    made.shutdown()


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_an_encoder_embeds(tmp_path: Path, kind: str, device: str) -> None:
    model = encoder(kind)
    save(model, tmp_path)
    made = engine(tmp_path, device=device, num_kv_blocks=None, max_num_batched_tokens=120)
    assert made.info.tasks == ("embed",) and made.info.max_model_len == 96
    assert made.info.embedding is not None and made.info.embedding.pooling == "mean"
    lengths = [1, 2, 17, 96, 40, 3, 60, 96, 33]
    for how in ("mean", "cls", "last"):
        prompts = [[2 + t % (99) for t in prompt_of(n, seed=n)] for n in lengths]
        requests = [embed(f"{how} {i}", ids, how, i % 2 == 0) for i, ids in enumerate(prompts)]
        found = run(made, *requests)
        for i, (request, ids) in enumerate(zip(requests, prompts, strict=True)):
            wanted = expected(model, ids, how, i % 2 == 0)
            torch.testing.assert_close(numbers(found[request.id][0].embedding), wanted, **CLOSE)
    stats = made.stats()
    assert stats.prefix_query_tokens and not stats.prefix_hit_tokens
    assert stats.steps < 3 * len(lengths)  # several share a step
    with pytest.raises(RequestRefused, match=r"97 tokens.*96"):
        made.add(embed("long", prompt_of(97), "mean"))
    with pytest.raises(ParamError, match="no head to generate"):
        made.add(greedy("talk", [5, 6], 3))
    made.shutdown()


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
@pytest.mark.parametrize("kind", ["Bert", "Llama"])
def test_smaller_weights_point_the_same_way(
    tmp_path: Path, kind: str, options: dict[str, str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    model = encoder(kind, **sizes) if kind == "Bert" else decoder(kind, **sizes)
    save(model, tmp_path)
    made = engine(tmp_path, device="cpu", num_kv_blocks=None, **options)
    requests = [embed(str(n), [2 + t % 99 for t in prompt_of(n)], "mean") for n in (3, 30, 70)]
    found = run(made, *requests)
    for request in requests:
        wanted = expected(model, request.prompt_token_ids, "mean")
        assert float(numbers(found[request.id][0].embedding) @ wanted) > 0.99
    made.shutdown()


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "lasttoken"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_checkpoint_says_how(tmp_path: Path, pooling: str, normalize: bool) -> None:
    model = encoder("Bert") if pooling == "cls_token" else decoder("Qwen2")
    save(model, tmp_path, pooling=pooling, normalize=normalize, max_seq_length=8, lowercase=True)
    how = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}[pooling]
    with LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
        info = llm.info.embedding
        assert info is not None
        assert (info.pooling, info.normalize, info.max_tokens) == (how, normalize, 8)
        outputs = llm.embed([text.upper() for text in TEXTS])
        for text, output in zip(TEXTS, outputs, strict=True):
            ids = llm.tokenize(text).token_ids
            assert output.prompt_token_ids == ids and ids[0] == 2 and ids[-1] == 3
            got = torch.tensor(output.outputs.embedding, dtype=torch.float64)
            torch.testing.assert_close(got, expected(model, ids, how, normalize), **CLOSE)
            assert output.outputs.hidden_size == 32 and output.finished
        long = "the cat and the dog and the red house"
        with pytest.raises(ParamError, match=r"11 tokens.*at most 8.*truncate_prompt_tokens"):
            llm.embed(long)
        for keep, left in ((-1, 8), (5, 5)):
            [cut] = llm.embed(long, PoolingParams(truncate_prompt_tokens=keep))
            whole = llm.tokenize(long).token_ids
            assert cut.prompt_token_ids == [*whole[: left - 1], 3]
        [ids_cut] = llm.embed([whole], PoolingParams(truncate_prompt_tokens=4))
        assert ids_cut.prompt_token_ids == whole[:4]
        with pytest.raises(ParamError, match="no head to generate"):
            llm.generate("the cat")


def test_the_operator_may_say_otherwise(tmp_path: Path) -> None:
    model = decoder("Llama")
    save(model, tmp_path, pooling="max_tokens", normalize=True)
    with pytest.raises(ModelConfigError, match=r"pools by max_tokens.*--pooling"):
        engine(tmp_path)
    made = engine(tmp_path, pooling="cls")
    assert made.info.embedding is not None
    assert (made.info.embedding.pooling, made.info.embedding.source) == ("cls", "--pooling")
    made.shutdown()


def test_tasks_are_chosen_and_refused(llama: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = llama
    for task, names in (("generate", ("generate",)), ("embed", ("embed",))):
        made = engine(folder, task=task)
        assert made.info.tasks == names
        wrong = embed("a", [5], "last") if task == "generate" else greedy("a", [5], 2)
        with pytest.raises(ParamError, match=f"--task {task}"):
            made.add(wrong)
        made.shutdown()
    with pytest.raises(ConfigError, match="needs embeddings"):
        engine(folder, task="generate", pooling="mean")
    bert = save(encoder("Bert"), tmp_path / "bert")
    for options, words in (
        ({"task": "generate"}, "no head to generate"),
        ({"num_kv_blocks": 20}, "--num-kv-blocks sizes a KV cache"),
        ({"speculative_config": {"method": "ngram"}}, "generates none"),
    ):
        with pytest.raises(ConfigError, match=words):
            engine(bert, **{"num_kv_blocks": None, **options})


def test_modules_that_are_not_implemented(tmp_path: Path) -> None:
    """An embedding model does not start with them; a generative one does, and embeds nothing."""
    dense = save(decoder("Llama"), tmp_path / "dense", pooling="mean_tokens", further=("Dense",))
    with pytest.raises(ModelConfigError, match="module Dense"):
        engine(dense)
    whole = make("Llama", {})
    made = engine(save(whole, tmp_path / "whole", pooling="mean_tokens", further=("Dense",)))
    assert made.info.tasks == ("generate",)
    assert any("module Dense" in note for note in made.info.notes)
    with pytest.raises(ParamError, match="module Dense"):
        made.add(embed("a", [5], "last"))
    made.shutdown()


def test_shorter_embeddings_where_the_checkpoint_allows_them(tmp_path: Path) -> None:
    model = encoder("Bert")
    any_size = save(model, tmp_path / "any", config={"is_matryoshka": True})
    listed = save(model, tmp_path / "listed", config={"matryoshka_dimensions": [8, 16, 32]})
    none = save(model, tmp_path / "none")
    with LLM(str(any_size), device="cpu", dtype="float32") as llm:
        [whole] = llm.embed(TEXTS[0], PoolingParams(normalize=False))
        for size in (1, 5, 31, 32):
            [cut] = llm.embed(TEXTS[0], PoolingParams(dimensions=size))
            wanted = torch.tensor(whole.outputs.embedding[:size], dtype=torch.float64)
            got = torch.tensor(cut.outputs.embedding, dtype=torch.float64)
            torch.testing.assert_close(got, wanted / wanted.norm(), **CLOSE)
        with pytest.raises(ParamError, match="dimensions=33"):
            llm.embed(TEXTS[0], PoolingParams(dimensions=33))
    with LLM(str(listed), device="cpu", dtype="float32") as llm:
        assert llm.embed(TEXTS[0], PoolingParams(dimensions=8))[0].outputs.hidden_size == 8
        with pytest.raises(ParamError, match="8, 16 or 32"):
            llm.embed(TEXTS[0], PoolingParams(dimensions=9))
    with LLM(str(none), device="cpu", dtype="float32") as llm:
        with pytest.raises(ParamError, match="does not say that they may be cut"):
            llm.embed(TEXTS[0], PoolingParams(dimensions=8))
        assert len(llm.embed(TEXTS, PoolingParams(dimensions=32))) == len(TEXTS)


def test_numbers_that_are_not_finite_fail_their_request_alone(tmp_path: Path) -> None:
    model = encoder("Bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[7] = float("nan")
    save(model, tmp_path)
    with LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
        with pytest.raises(EmbeddingFailed, match="not finite"):
            llm.embed([[2, 7, 3]])
        assert len(llm.embed([[2, 8, 3], [2, 9, 3]])) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "multiple of 5 heads"),
    ],
)
def test_encoders_that_are_not_implemented(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    save(encoder("Bert"), tmp_path, config=changes)
    with pytest.raises((ConfigError, ModelConfigError), match=words):
        engine(tmp_path, num_kv_blocks=None)


@pytest.mark.parametrize("act", ["gelu_new", "relu"])
def test_other_activations(tmp_path: Path, act: str) -> None:
    model = randomised(encoder("Bert", hidden_act=act))
    save(model, tmp_path)
    made = engine(tmp_path, num_kv_blocks=None)
    ids = [2 + t % 99 for t in prompt_of(20)]
    [update] = run(made, embed("a", ids, "mean"))["a"]
    torch.testing.assert_close(numbers(update.embedding), expected(model, ids, "mean"), **CLOSE)
    made.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mean", "last"])
def test_the_default_models_embeddings_are_those_of_transformers(kind: str) -> None:
    """Of real text, in chunks beside others and alone."""
    config = EngineConfig()
    files = resolve_model(config)
    model = load_transformers(files).base_model
    tokenizer = load_tokenizer(files)
    texts = [f"{text} and then {text}. " * (1 + 9 * i) for i, text in enumerate(TEXTS)]
    with LLM(device="cpu", dtype="float32", pooling=kind, max_num_batched_tokens=48) as llm:
        together = llm.embed(texts)
        alone = [llm.embed(text)[0] for text in texts]
    for text, many, one in zip(texts, together, alone, strict=True):
        wanted = expected(model, tokenizer.encode(text), kind)
        for output in (many, one):
            got = torch.tensor(output.outputs.embedding, dtype=torch.float64)
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
