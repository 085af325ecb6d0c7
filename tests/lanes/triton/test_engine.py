"""The real engine with tiny models through the real kernels: the reference backend's greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import engine, everything, greedy, make, prompt_of, run, tokens_of

from octavo.backends.triton.graphs import DecodeGraphs
from octavo.core.engine import Engine
from octavo.core.types import Request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("Llama", {}),
    "windows": ("Mistral", {"sliding_window": 20}),
    "biases, an odd head size": ("Qwen2", {"head_dim": 12, "num_attention_heads": 6}),
}


def decoder(made: Engine) -> DecodeGraphs:
    forward = made._runner._forward
    assert isinstance(forward, DecodeGraphs)
    return forward


def compare(folder: Path, requests: list[Request], **options: Any) -> Engine:
    values = {"max_num_seqs": 4, "num_kv_blocks": 24, **options}
    mine = engine(folder, device="cuda:interpret", **values)
    found = run(mine, *requests)
    wanted = run(engine(folder, device="reference", **values), *requests)
    for request in requests:
        assert tokens_of(found[request.id]) == tokens_of(wanted[request.id])
    return mine


def saved(tmp_path: Path, kind: str, changes: dict[str, Any]) -> Path:
    make(kind, {"num_hidden_layers": 2, **changes}).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_the_references(name: str, tmp_path: Path) -> None:
    """Prompts together and apart, decoding in padded frames, chunks, and a prefix that is shared."""
    folder = saved(tmp_path, *MODELS[name])
    prefix = prompt_of(34)
    requests = [
        greedy("a", prompt_of(5, 1), 6),
        greedy("b", [*prefix, 3], 4),
        greedy("c", [*prefix, 9, 8], 5),
    ]
    mine = compare(folder, requests, max_num_batched_tokens=32)
    assert decoder(mine).compilations == 3


def test_frames_are_made_at_the_start_and_not_again(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Llama", {"num_hidden_layers": 1})
    made = engine(folder, device="cuda:interpret", max_num_seqs=4, num_kv_blocks=30)
    graphs = decoder(made)
    assert graphs.buckets == (1, 2, 4)
    assert made.stats().compilations == 3
    run(made, *[greedy(f"x{i}", prompt_of(4 + i, i), 3) for i in range(3)])
    run(made, greedy("z", prompt_of(30), 3))
    assert made.stats().compilations == 3


def test_preemption_forks_and_copies_on_write(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Llama", {"num_hidden_layers": 1})
    requests = [greedy("n", prompt_of(20), 4, n=2), greedy("m", prompt_of(30, 2), 4)]
    values = {"max_num_seqs": 4, "num_kv_blocks": 7}
    mine = engine(folder, device="cuda:interpret", **values)
    found, wanted = (
        run(made, *requests) for made in (mine, engine(folder, device="reference", **values))
    )
    for name in ("n", "m"):
        by_sample = [
            {i: [t for u in updates[name] if u.index == i for t in u.token_ids] for i in range(2)}
            for updates in (found, wanted)
        ]
        assert by_sample[0] == by_sample[1]


def test_seeded_draws_and_logprobs(tmp_path: Path) -> None:
    import torch

    folder = saved(tmp_path, "Llama", {"num_hidden_layers": 1})
    hot = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 5}
    requests = [
        greedy("s", prompt_of(9), 4, **hot),
        greedy("p", prompt_of(7, 2), 3, logprobs=-1, prompt_logprobs=-1),
    ]
    results = [
        run(engine(folder, device=device, max_num_seqs=2, num_kv_blocks=12), *requests)
        for device in ("cuda:interpret", "reference")
    ]
    mine, wanted = results
    assert tokens_of(mine["s"]) == tokens_of(wanted["s"])
    torch.testing.assert_close(everything(mine["p"]), everything(wanted["p"]), atol=1e-4, rtol=0)


def test_float16_and_an_8_bit_cache_run(tmp_path: Path) -> None:
    """Numbers this coarse may change a token; what is checked is that they go through."""
    folder = saved(tmp_path, "Llama", {"num_hidden_layers": 1})
    made = engine(
        folder, device="cuda:interpret", dtype="float16", kv_cache_dtype="fp8", max_num_seqs=2
    )
    assert made.info.kv_dtype == "fp8"
    tokens = tokens_of(run(made, greedy("a", prompt_of(20), 3))["a"])
    assert len(tokens) == 3 and all(0 <= t < 101 for t in tokens)
    plain = engine(folder, device="cuda:interpret", dtype="float16", max_num_seqs=2)
    assert plain.info.kv_dtype == "float16"  # follows the weights
