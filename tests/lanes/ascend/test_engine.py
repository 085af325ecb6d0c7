"""The whole engine through torch-npu's own signatures: the reference backend's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import engine, greedy, make, prompt_of, run
from vendor_engine import (
    gives_the_references_bfloat16,
    gives_the_references_draws,
    gives_tokens,
    gives_what_transformers_gives,
)

from octavo.backends.ascend import backend as ascend
from octavo.backends.ascend.vendor import vendor
from octavo.core.config import ConfigError

pytestmark = pytest.mark.usefixtures("devices")

LAYERS = 3


def build(folder: Path, **options: Any) -> Any:
    return engine(folder, **{"device": "npu", "max_num_seqs": 8, **options})


@pytest.mark.parametrize("rows", [256, 0])
@pytest.mark.parametrize("tokens", [64, 2048])
def test_float32_tokens_and_logprobs_are_those_of_transformers(
    npu: Any, llama: tuple[Path, Any], tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks and whole, with forks and copy-on-write; a second time from cached prefixes. With graphs
    and without."""
    monkeypatch.setattr(ascend, "GRAPH_ROWS", rows)
    folder, model = llama
    made = build(folder, max_num_batched_tokens=tokens)
    gives_what_transformers_gives(made, model)
    assert (npu["graph_capture"] > 0) == (rows > 0) == (npu["graph_replay"] > 0)
    made.shutdown()


def test_preempted_sequences_come_back(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    made = build(folder, num_kv_blocks=6, max_num_batched_tokens=700)
    gives_tokens(made, model, [120] * 5, 20)
    assert made.stats().preemptions > 0
    made.shutdown()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Mistral", {"sliding_window": 5, "head_dim": 16}),
        ("Mistral", {"sliding_window": 131, "head_dim": 16}),
        ("Qwen2", {"hidden_size": 64}),
        ("Llama", {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh", "head_dim": 16}),
    ],
)
def test_kinds_of_models(npu: Any, tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    model = make(kind, {"max_position_embeddings": 512, **changes})
    model.save_pretrained(tmp_path)
    made = build(tmp_path, max_num_batched_tokens=100)
    gives_tokens(made, model, (150, 9, 129, 1), 10)
    assert npu["graph_replay"] > 0
    made.shutdown()


def test_bfloat16_is_the_reference_backends(llama: tuple[Path, Any]) -> None:
    gives_the_references_bfloat16(build, llama[0])


def test_seeded_draws_are_the_reference_backends(llama: tuple[Path, Any]) -> None:
    gives_the_references_draws(build, llama[0])


def test_what_a_step_calls(npu: Any, llama: tuple[Path, Any]) -> None:
    """Every layer writes once and attends once, in a prompt's step and in a replayed one."""
    folder, _ = llama
    made = build(folder, enable_prefix_caching=False)
    run(made, greedy("warm", prompt_of(20), 6), greedy("up", prompt_of(20, seed=4), 6))
    made.add(greedy("a", prompt_of(20, seed=7), 6))
    made.add(greedy("b", prompt_of(20, seed=8), 6))
    common = {"_npu_reshape_and_cache": LAYERS, "npu_swiglu": LAYERS, "npu_rotary_mul": 2 * LAYERS}
    norms = {"npu_rms_norm": 1, "npu_add_rms_norm": 2 * LAYERS}
    npu.clear()
    made.step()  # both prompts
    assert npu == {**common, **norms, "npu_fused_infer_attention_score": LAYERS}
    for _ in range(3):
        npu.clear()
        made.step()
        graph = {"graph_update": 1, "graph_replay": 1}
        assert npu == {**common, **norms, **graph, "_npu_paged_attention": LAYERS}
    made.shutdown()


def test_numbers_of_graphs_follow_buckets(npu: Any, llama: tuple[Path, Any]) -> None:
    folder, _ = llama
    made = build(folder, enable_prefix_caching=False)
    for again in range(2):
        npu.clear()
        run(made, *(greedy(f"{again} {i}", prompt_of(10 + i, seed=i), 12) for i in range(3)))
        captured = npu["graph_capture"]
        assert (0 < captured <= 4) if again == 0 else captured == 0
    made.shutdown()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 16}, "it has 128"),
        ({"dtype": "float16"}, "it has bfloat16"),
        ({"kv_cache_dtype": "int8"}, "is not offered by npu"),
        ({"kv_cache_dtype": "bfloat16"}, "queries and cache of one dtype"),
        ({"quantization": "int8"}, "it quantises nothing"),
    ],
)
def test_what_is_not_declared_is_refused(
    llama: tuple[Path, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(llama[0], **options)


def test_a_head_size_that_the_attention_has_not_is_refused(tmp_path: Path) -> None:
    make("Llama", {"head_dim": 24}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="head size 24"):
        build(tmp_path)


def test_the_310p_is_refused(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor().npu, "get_device_name", lambda *_: "Ascend310P3")
    with pytest.raises(ConfigError, match="Ascend310P3, whose KV cache has a fractal layout"):
        build(llama[0])


def test_the_scorecard_says_stand_in(llama: tuple[Path, Any]) -> None:
    info = build(llama[0]).info
    assert "stand-in" in info.capabilities["notes"]["executed on"]
    assert info.device == "npu" and info.backend == "ascend" and info.block_size == 128
