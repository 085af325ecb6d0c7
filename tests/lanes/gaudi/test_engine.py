"""The whole engine on the stand-in device: the reference backend's tokens, through the vendor's calls."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_models import engine, full, greedy, make, prompt_of, reference, run, tokens_of

from octavo.core.config import ConfigError

LAYERS = 3


def build(folder: Path, **options: Any) -> Any:
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512}
    return engine(folder, **{"device": "hpu", **defaults, **options})


def requests_of(case: int, count: int = 6) -> list[Any]:
    dice = random.Random(case)
    common = prompt_of(400, seed=case)
    found = []
    for i in range(count):
        prompt = common[: dice.choice([0, 20, 128, 140, 300])] + prompt_of(
            dice.randint(1, 8), seed=i
        )
        found.append(
            greedy(
                f"r{i}",
                prompt,
                dice.randint(6, 20),
                n=dice.choice([1, 1, 2]),
                logprobs=-1,
                prompt_logprobs=-1 if i == 0 else None,
            )
        )
    return found


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
    requests = requests_of(1)
    first = run(made, *requests)
    second = run(made, *(msgspec.structs.replace(r, id=r.id + " again") for r in requests))
    for r in requests:
        tokens_wanted, logprobs = reference(model, r.prompt_token_ids, r.params.max_tokens or 0)
        behind = len(r.prompt_token_ids) - 1
        for updates in (first[r.id], second[r.id + " again"]):
            for index in range(r.params.n):
                mine = [u for u in updates if u.index == index]
                assert tokens_of(mine) == tokens_wanted
                got = full([e for u in mine for e in u.logprobs or ()])
                torch.testing.assert_close(got, logprobs[behind:], atol=2e-4, rtol=1e-4)
    stats = made.stats()
    assert stats.prefix_hit_tokens > 0 and stats.kv_blocks_used == 0
    assert (standin.calls["hpu_graph_capture"] > 0) == lazy
    made.shutdown()


def test_preempted_sequences_come_back(standin: Any, llama: tuple[Path, Any]) -> None:
    folder, model = llama
    made = build(folder, num_kv_blocks=6, max_model_len=256)
    requests = [greedy(f"r{i}", prompt_of(120, seed=i), 20) for i in range(5)]
    found = run(made, *requests)
    assert made.stats().preemptions > 0
    for r in requests:
        assert tokens_of(found[r.id]) == reference(model, r.prompt_token_ids, 20)[0]
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
    requests = [greedy(f"r{i}", prompt_of(n, seed=i), 10) for i, n in enumerate((150, 9, 129))]
    found = run(made, *requests)
    for r in requests:
        assert tokens_of(found[r.id]) == reference(model, r.prompt_token_ids, 10)[0]
    made.shutdown()


def test_bfloat16_is_the_reference_backends(standin: Any, llama: tuple[Path, Any]) -> None:
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


def test_seeded_draws_are_the_reference_backends(standin: Any, llama: tuple[Path, Any]) -> None:
    folder, _ = llama
    requests = [
        greedy(f"r{i}", prompt_of(20, seed=i), 8, temperature=0.9, seed=i, top_k=20, top_p=0.9)
        for i in range(4)
    ]
    ours = run(build(folder), *requests)
    theirs = run(engine(folder, device="reference"), *requests)
    assert all(tokens_of(ours[r.id]) == tokens_of(theirs[r.id]) for r in requests)


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
