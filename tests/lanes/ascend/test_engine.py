"""The whole engine through torch-npu's own signatures: the reference backend's tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_models import engine, full, greedy, make, prompt_of, reference, run, tokens_of

from octavo.backends.ascend import backend as ascend
from octavo.backends.ascend.vendor import vendor
from octavo.core.config import ConfigError

pytestmark = pytest.mark.usefixtures("devices")

LAYERS = 3


def build(folder: Path, **options: Any) -> Any:
    return engine(folder, **{"device": "npu", "max_num_seqs": 8, **options})


def requests_of(case: int, count: int = 6) -> list[Any]:
    dice = random.Random(case)
    common = prompt_of(400, seed=case)
    found = []
    for i in range(count):
        prompt = common[: dice.choice([0, 20, 128, 140, 300])]
        prompt = prompt + prompt_of(dice.randint(1, 8), seed=i)
        wanted = {"n": dice.choice([1, 1, 2]), "prompt_logprobs": -1 if i == 0 else None}
        found.append(greedy(f"r{i}", prompt, dice.randint(6, 20), logprobs=-1, **wanted))
    return found


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
    requests = requests_of(1)
    first = run(made, *requests)
    second = run(made, *(msgspec.structs.replace(r, id=r.id + " again") for r in requests))
    for r in requests:
        wanted, logprobs = reference(model, r.prompt_token_ids, r.params.max_tokens or 0)
        behind = len(r.prompt_token_ids) - 1
        for updates in (first[r.id], second[r.id + " again"]):
            for index in range(r.params.n):
                mine = [u for u in updates if u.index == index]
                assert tokens_of(mine) == wanted
                got = full([e for u in mine for e in u.logprobs or ()])
                torch.testing.assert_close(got, logprobs[behind:], atol=2e-4, rtol=1e-4)
    stats = made.stats()
    assert stats.prefix_hit_tokens > 0 and stats.kv_blocks_used == 0
    assert (npu["graph_capture"] > 0) == (rows > 0) == (npu["graph_replay"] > 0)
    made.shutdown()


def test_preempted_sequences_come_back(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    made = build(folder, num_kv_blocks=6, max_num_batched_tokens=700)
    requests = [greedy(f"r{i}", prompt_of(120, seed=i), 20) for i in range(5)]
    found = run(made, *requests)
    assert made.stats().preemptions > 0
    for r in requests:
        assert tokens_of(found[r.id]) == reference(model, r.prompt_token_ids, 20)[0]
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
    requests = [greedy(f"r{i}", prompt_of(n, seed=i), 10) for i, n in enumerate((150, 9, 129, 1))]
    found = run(made, *requests)
    for r in requests:
        assert tokens_of(found[r.id]) == reference(model, r.prompt_token_ids, 10)[0]
    assert npu["graph_replay"] > 0
    made.shutdown()


def test_bfloat16_is_the_reference_backends(llama: tuple[Path, Any]) -> None:
    """The same tokens while the reference's first two choices are further apart than bfloat16's noise."""
    folder, _ = llama
    lengths = (140, 30, 7, 129, 1, 64, 128, 90)
    requests = [
        greedy(f"r{i}", prompt_of(lengths[i % 8], seed=i), 4, logprobs=-1) for i in range(32)
    ]
    options = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "max_num_batched_tokens": 64}
    ours = run(build(folder, **options), *requests)
    theirs = run(engine(folder, device="reference", **options), *requests)
    certain = 0
    for r in requests:
        mine, wanted = tokens_of(ours[r.id]), tokens_of(theirs[r.id])
        for i, entry in enumerate(e for u in theirs[r.id] for e in u.logprobs or ()):
            if entry.top_logprobs[0] - entry.top_logprobs[1] < 0.1:
                break
            assert mine[i] == wanted[i]
            certain += 1
    assert certain > 30


def test_seeded_draws_are_the_reference_backends(llama: tuple[Path, Any]) -> None:
    folder, _ = llama
    requests = [
        greedy(f"r{i}", prompt_of(20, seed=i), 8, temperature=0.9, seed=i, top_k=20, top_p=0.9)
        for i in range(4)
    ]
    ours = run(build(folder), *requests)
    theirs = run(engine(folder, device="reference"), *requests)
    assert all(tokens_of(ours[r.id]) == tokens_of(theirs[r.id]) for r in requests)


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
