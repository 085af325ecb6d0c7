"""The whole engine on the stand-in device: the reference backend's tokens, through the vendor's calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_models import engine, greedy, make, prompt_of, run
from vendor_engine import (
    gives_the_references_bfloat16,
    gives_the_references_draws,
    gives_tokens,
    gives_what_transformers_gives,
    requests_of,
)

from octavo.core.config import ConfigError

LAYERS = 3


def build(folder: Path, **options: Any) -> Any:
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512}
    return engine(folder, **{"device": "hpu", **defaults, **options})


@pytest.mark.parametrize("chip", ["Gaudi3", "Gaudi2"])
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("tokens", [64, 512])
def test_float32_tokens_and_logprobs_are_those_of_transformers(
    standin: Any, llama: tuple[Path, Any], chip: str, lazy: bool, tokens: int
) -> None:
    """In chunks and whole, with forks and copy-on-write; a second time from cached prefixes."""
    standin.generation[0], standin.lazy[0] = chip, lazy
    folder, model = llama
    made = build(folder, max_num_batched_tokens=tokens)
    gives_what_transformers_gives(made, model)
    assert (standin.calls["hpu_graph_capture"] > 0) == lazy
    made.shutdown()


def test_preempted_sequences_come_back(standin: Any, llama: tuple[Path, Any]) -> None:
    folder, model = llama
    made = build(folder, num_kv_blocks=6, max_model_len=256)
    gives_tokens(made, model, [120] * 5, 20)
    assert made.stats().preemptions > 0
    made.shutdown()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Mistral", {"sliding_window": 5}),
        ("Mistral", {"sliding_window": 131}),
        ("Qwen2", {}),
        ("Llama", {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    ],
)
def test_kinds_of_models(standin: Any, tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    model = make(kind, {"max_position_embeddings": 512, **changes})
    model.save_pretrained(tmp_path)
    made = build(tmp_path, max_num_batched_tokens=100)
    gives_tokens(made, model, (150, 9, 129), 10)
    made.shutdown()


def test_bfloat16_is_the_reference_backends(standin: Any, llama: tuple[Path, Any]) -> None:
    gives_the_references_bfloat16(build, llama[0])


def test_seeded_draws_are_the_reference_backends(standin: Any, llama: tuple[Path, Any]) -> None:
    gives_the_references_draws(build, llama[0])


def test_what_a_step_calls(standin: Any, llama: tuple[Path, Any]) -> None:
    """Every layer writes once on each side and attends once; a graph is replayed, not launched anew."""
    folder, _ = llama
    made = build(folder, enable_prefix_caching=False)
    for name, seed in (("a", 7), ("b", 8)):
        made.add(greedy(name, prompt_of(20, seed=seed), 6))
    sides = 2 * LAYERS
    seen = []
    while made.has_unfinished():
        standin.reset()
        made.step()
        calls, ops = standin.ran(), standin.device().op_counts()
        assert ops["aten::index_copy"] == sides
        assert calls["rms_norm"] == sides + 1 and calls["rotary_pos_embedding"] == sides
        assert calls["hpu_graph_replay"] == 1 and "hpu_graph_capture" not in calls
        assert calls["mark_step"] >= 2
        seen.append("prompt" if "sdpa_recomp_fwd" in calls else "decode")
        if seen[-1] == "prompt":
            assert calls["sdpa_recomp_fwd"] == LAYERS and "block_softmax" not in calls
            assert ops["aten::index_fill_"] == sides  # the block that begins
        else:
            assert calls["block_softmax"] == calls["block_softmax_adjustment"] == LAYERS
            assert "aten::index_fill_" not in ops
        _, downloads, syncs = standin.device().transfers()
        assert downloads == 1 and syncs == 0  # the tokens, and nothing else
    assert seen[:3] == ["prompt", "decode", "prompt"] and set(seen[3:]) == {"decode"}
    made.shutdown()


@pytest.mark.parametrize("window", [None, 40])
def test_nothing_is_captured_after_the_start(
    standin: Any, tmp_path: Path, window: int | None
) -> None:
    """Whatever the lengths, chunks, samples, prefix hits and rows of log-probabilities."""
    changes = {"max_position_embeddings": 512, "sliding_window": window}
    make("Mistral", changes).save_pretrained(tmp_path)
    made = build(tmp_path, max_num_seqs=6, max_num_batched_tokens=100, num_kv_blocks=30)
    before = made.stats().compilations
    standin.reset()
    for case in range(3):
        named = (msgspec.structs.replace(r, id=f"{case} {r.id}") for r in requests_of(case))
        run(made, *named, greedy(f"{case} one", prompt_of(1), 3))
    assert made.stats().compilations == before > 20
    assert standin.calls["hpu_graph_capture"] == 0 and standin.calls["hpu_graph_replay"] > 100
    made.shutdown()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 16}, "it has 128"),
        ({"dtype": "float16"}, "it has bfloat16, float32"),
        ({"kv_cache_dtype": "int8"}, "is not offered by hpu"),
        ({"quantization": "int8"}, "hpu does not offer"),
    ],
)
def test_what_is_not_declared_is_refused(
    standin: Any, llama: tuple[Path, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(llama[0], **options)


def test_the_scorecard_says_stand_in(standin: Any, llama: tuple[Path, Any]) -> None:
    info = build(llama[0]).info
    assert "stand-in" in info.capabilities["notes"]["executed on"]
    assert info.device == "hpu" and info.backend == "gaudi" and info.block_size == 128
