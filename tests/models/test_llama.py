"""Tiny random Llama, Mistral and Qwen2 models: what transformers computes is what Octavo computes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from model_variants import VARIANTS, YARN
from safetensors.torch import load_file, save_file
from tiny_models import (
    VOCAB,
    engine,
    everything,
    full,
    greedy,
    make,
    prompt_of,
    reference,
    run,
    tokens_of,
)

from octavo.core.config import ConfigError
from octavo.core.loading.errors import ModelConfigError, WeightsError
from octavo.core.params import SamplingParams
from octavo.core.types import Request

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    kind, changes, length = VARIANTS[name]
    model = make(kind, changes)
    model.save_pretrained(tmp_path)
    prompt = prompt_of(length)
    tokens, logprobs = reference(model, prompt, 12)
    for budget in (512, 7):  # whole and in chunks
        made = engine(tmp_path, max_num_batched_tokens=budget)
        updates = run(made, greedy("r", prompt, 12, logprobs=-1, prompt_logprobs=-1))["r"]
        assert tokens_of(updates) == tokens
        torch.testing.assert_close(everything(updates), logprobs, atol=1e-4, rtol=0)
        made.shutdown()


def test_a_window_changes_the_answer(tmp_path: Path) -> None:
    """The variants above would not notice a window that is never applied if it made no difference."""
    prompt = prompt_of(40)
    narrow, wide = (
        reference(make("Mistral", {"sliding_window": w}), prompt, 4)[1] for w in (8, None)
    )
    assert (narrow[-1] - wide[-1]).abs().max() > 0.1


def test_old_style_rope_settings(tmp_path: Path) -> None:
    """Most published checkpoints write rope_theta beside rope_scaling, some with `type`."""
    model = make("Llama", YARN)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    found = config.pop("rope_parameters")
    config["rope_theta"] = found.pop("rope_theta")
    config["rope_scaling"] = {"type": found.pop("rope_type"), **found}
    path.write_text(json.dumps(config))
    prompt = prompt_of(60)
    assert (
        tokens_of(run(engine(tmp_path), greedy("r", prompt, 12))["r"])
        == reference(model, prompt, 12)[0]
    )


def test_sharded_checkpoint(llama: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = llama
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = prompt_of(20)
    one, many = (run(engine(f), greedy("r", prompt, 8))["r"] for f in (folder, tmp_path))
    assert tokens_of(one) == tokens_of(many) == reference(model, prompt, 8)[0]


def test_half_precision_loads_and_runs(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    prompt = prompt_of(20)
    exact = reference(model, prompt, 1)[1]
    for dtype, margin in (("bfloat16", 0.15), ("float16", 0.02)):
        made = engine(folder, dtype=dtype)
        assert made.info.dtype == dtype
        updates = run(made, greedy("r", prompt, 1, logprobs=-1, prompt_logprobs=-1))["r"]
        assert 0 < (everything(updates) - exact).abs().mean() < margin
    half = engine(folder, dtype="bfloat16").info.weight_bytes
    assert engine(folder).info.weight_bytes == 2 * half


def test_bfloat16_checkpoint_in_float32(llama: tuple[Path, Any], tmp_path: Path) -> None:
    import copy

    model = copy.deepcopy(llama[1]).bfloat16()
    model.save_pretrained(tmp_path)
    made = engine(tmp_path, dtype="auto")
    assert made.info.dtype == "float32" and any("bfloat16" in note for note in made.info.notes)
    prompt = prompt_of(20)
    assert (
        tokens_of(run(made, greedy("r", prompt, 8))["r"]) == reference(model.float(), prompt, 8)[0]
    )


# ------------------------------------------------------------------ the same in any company


@pytest.mark.parametrize("budget", [512, 16])
@pytest.mark.parametrize("blocks", [400, 24])
def test_the_same_in_any_company(llama: tuple[Path, Any], budget: int, blocks: int) -> None:
    """Alone, eight at once, beside long prompts, in chunks, preempted: same tokens, same logprobs."""
    folder, model = llama
    prompt = prompt_of(37)
    tokens, logprobs = reference(model, prompt, 40)
    made = engine(
        folder,
        max_num_batched_tokens=budget,
        num_kv_blocks=blocks,
        max_model_len=320,
        enable_prefix_caching=blocks > 24,
    )
    crowd = [greedy(f"r{i}", prompt, 40, logprobs=-1) for i in range(8)]
    long = [
        Request(id=f"x{i}", prompt_token_ids=prompt_of(150 + i, seed=i), priority=-(i % 2),
                params=SamplingParams(temperature=1.0, max_tokens=20, n=1 + i % 2))
        for i in range(3)
    ]  # fmt: skip
    found = run(made, *[r for pair in zip(crowd, long, strict=False) for r in pair], *crowd[3:])
    for r in crowd:
        assert tokens_of(found[r.id]) == tokens
        got = full([e for u in found[r.id] for e in u.logprobs or ()])
        torch.testing.assert_close(got, logprobs[len(prompt) - 1 :], atol=1e-4, rtol=0)
    stats = made.stats()
    assert stats.kv_blocks_used == 0
    if budget == 512:
        assert (stats.preemptions > 0) == (blocks == 24)


@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_prompt_logprobs_twice(llama: tuple[Path, Any], length: int) -> None:
    folder, model = llama
    prompt = prompt_of(length)
    logprobs = reference(model, prompt, 2)[1]
    made = engine(folder)
    for name in ("first", "second"):
        updates = run(made, greedy(name, prompt, 2, logprobs=-1, prompt_logprobs=-1))[name]
        entries = [e for u in updates for e in u.prompt_logprobs or ()]
        assert [e.token_id for e in entries] == prompt[1:]
        torch.testing.assert_close(everything(updates), logprobs, atol=1e-4, rtol=0)


def test_broken_weights_end_requests_not_the_engine(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    """A token whose embedding is NaN poisons its own sequence and no neighbour."""
    import copy

    model = copy.deepcopy(llama[1])
    with torch.no_grad():
        model.model.embed_tokens.weight[100] = float("nan")
    model.save_pretrained(tmp_path)
    clean = [t % 100 for t in prompt_of(20)]
    made = engine(tmp_path)
    found = run(
        made,
        greedy("good", clean, 3, logit_bias={100: -100.0}),
        greedy("bad", [5, 100, 6], 5, logprobs=2),
        greedy("scored", [5, 100, 6], 0, prompt_logprobs=1),
    )
    assert len(tokens_of(found["good"])) == 3
    for name in ("bad", "scored"):
        end = found[name][-1]
        assert end.finish_reason == "error" and "not finite" in str(end.stop_reason)
        assert not any(u.token_ids or u.logprobs or u.prompt_logprobs for u in found[name])


# -------------------------------------------------------------------------------- refusals


def rewritten(llama: tuple[Path, Any], folder: Path, change: Any) -> Path:
    tensors = load_file(llama[0] / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((llama[0] / "config.json").read_text())
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"missing.*model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda t: t.update({"model.layers.1.extra": torch.zeros(3)}), r"model\.layers\.1\.extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"model\.norm\.weight.*31"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.bias": torch.zeros(16)}),
            r"model\.layers\.0\.self_attn\.k_proj\.bias",
        ),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(
    llama: tuple[Path, Any], tmp_path: Path, change: Any, words: str
) -> None:
    with pytest.raises(WeightsError, match=f"(?s){words}"):
        engine(rewritten(llama, tmp_path, change))


def test_old_buffers_are_tolerated(llama: tuple[Path, Any], tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = rewritten(llama, tmp_path, lambda t: t.update({name: torch.zeros(4)}))
    assert len(tokens_of(run(engine(folder), greedy("r", [1, 2], 3))["r"])) == 3


def changed_config(llama: tuple[Path, Any], folder: Path, **values: Any) -> Path:
    """A copy of the model with other settings; `...` takes one away."""
    config = json.loads((llama[0] / "config.json").read_text()) | values
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not ...})
    )
    (folder / "model.safetensors").symlink_to(llama[0] / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"architectures": ["LlamaForCausalLn"]},
            r"LlamaForCausalLn is not supported; supported: "
            r".*LlamaForCausalLM.*MistralForCausalLM.*Qwen2ForCausalLM",
        ),
        ({"architectures": None, "model_type": "odd"}, "none .model_type 'odd'. is not supported"),
        ({"hidden_act": "relu6"}, "hidden_act 'relu6'.*silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'.*yarn"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' needs factor.*got None"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "'linear' needs factor.*got 0"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
            "'llama3' needs low_freq_factor",
        ),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "'default' needs rope_theta.*got '1e4'"),
        ({"architectures": "GPT2LMHeadModel"}, "architecture GPT2LMHeadModel is not supported"),
    ],
)
def test_what_is_not_supported_is_said(
    llama: tuple[Path, Any], tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(changed_config(llama, tmp_path, **values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": ...}, "lacks 'hidden_size'"),
        ({"num_attention_heads": ...}, "lacks 'num_attention_heads'"),
        ({"vocab_size": ...}, "lacks 'vocab_size'"),
        ({"intermediate_size": ...}, "lacks 'intermediate_size'"),
        ({"hidden_size": None}, "a value that cannot be used .*NoneType"),
        ({"hidden_size": "wide"}, "a value that cannot be used .*'wide'"),
        ({"rms_norm_eps": "small"}, "a value that cannot be used .*'small'"),
        ({"num_attention_heads": 0, "head_dim": None}, "a value that cannot be used"),
        ({"rope_parameters": "llama3"}, "a value that cannot be used"),
        ({"max_position_embeddings": 0}, "max_position_embeddings.*at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be at least 1"),
        ({"eos_token_id": "</s>"}, "a value that cannot be used .*'</s>'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\).*GGUF"),
    ],
)
def test_a_config_that_cannot_be_used_is_a_model_error(
    llama: tuple[Path, Any], tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    """Never a KeyError: a server tells such an error in one line and ends."""
    with pytest.raises(ModelConfigError, match=words):
        engine(changed_config(llama, tmp_path, **values))


def test_eos_ids_that_are_no_tokens_mask_nothing(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """Published configs name some. With min_tokens each EOS is masked: an index beyond the logits
    would end every request of the step, -1 would hide the last token."""
    folder = changed_config(llama, tmp_path, eos_token_id=[5, 999, -1])
    made = engine(folder)
    assert made.info.eos_token_ids == (5,)
    assert any("999" in note and "-1" in note for note in made.info.notes)
    prompt = prompt_of(20)
    request = Request(
        id="r",
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0, max_tokens=6, min_tokens=6),
        eos_token_ids=made.info.eos_token_ids,
    )
    found = run(made, request, greedy("neighbour", prompt, 6))
    assert len(tokens_of(found["r"])) == len(tokens_of(found["neighbour"])) == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 24}, r"--block-size 24 is not offered by reference; it has 16, 32"),
        ({"max_model_len": 513}, "513 exceeds the model's 512 positions"),
        ({"num_kv_blocks": 1}, "num_kv_blocks.*at least 2"),
        ({"num_kv_blocks": 5, "max_model_len": 512}, r"needs 32 KV blocks.*has 4: lower it to 64"),
        ({"num_kv_blocks": None, "kv_memory": 10}, "hold 0 KV blocks.*at least 2"),
        ({"num_kv_blocks": None, "kv_memory": 1 << 60}, "exceed the .* bytes free"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"device": "reference:nosuch"}, "torch cannot use device 'nosuch'"),
        ({"device": "reference:cuda:99"}, "torch cannot use device 'cuda:99'"),
        ({"device": "reference:meta"}, "meta device holds no numbers"),
    ],
)
def test_what_cannot_be_set_up_is_said(llama: tuple[Path, Any], options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(llama[0], **options)


def test_a_small_cache_shortens_the_context_and_says_so(llama: tuple[Path, Any]) -> None:
    made = engine(llama[0], num_kv_blocks=5)
    assert made.info.max_model_len == 64
    assert any(note.startswith("max_model_len 64") for note in made.info.notes)


def test_many_sequences_still_leave_rows_for_prompts(llama: tuple[Path, Any]) -> None:
    made = engine(llama[0], max_num_seqs=700)
    assert made.scheduler.limits.max_logits_rows > 700


@pytest.mark.parametrize("known", [60, VOCAB, 140])
def test_a_tokenizer_may_know_fewer_tokens_or_more_than_the_model(
    llama: tuple[Path, Any], tmp_path: Path, known: int
) -> None:
    """Published checkpoints pad their logits, or add tokens beyond them: a banned word must neither
    reach past the last logit nor stumble over a token that has no spelling."""
    folder = changed_config(llama, tmp_path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    letters = (alphabet[94:] + alphabet[:94])[-known:]  # ASCII last
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    words = [letters[50], letters[-1], letters[51] + letters[52]]
    made = engine(folder)
    forced = greedy("forced", [70], 4, bad_words=words, allowed_token_ids=[80, 100])
    found = run(
        made, forced, greedy("free", prompt_of(9), 30, bad_words=words), greedy("n", [1], 4)
    )
    assert set(tokens_of(found["forced"])) <= {80, 100}
    assert 50 not in tokens_of(found["free"]) and len(tokens_of(found["free"])) == 30
    assert len(tokens_of(found["n"])) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_from_an_engines_process_is_told(llama: tuple[Path, Any]) -> None:
    """It has none of the threads that compute, and would wait for them for ever."""
    engine(llama[0]).shutdown()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine(llama[0])
        except ConfigError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert b"forked from one that ran an engine" in os.read(read, 1000)
    os.close(read)
    engine(llama[0]).shutdown()
