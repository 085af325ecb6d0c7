"""Tiny models with int8 and int4 weights, end to end: how far from float32, and CPU against reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    VOCAB,
    engine,
    everything,
    greedy,
    make,
    prompt_of,
    reference,
    run,
    tokens_of,
)

WIDE = {"hidden_size": 64, "intermediate_size": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", WIDE),
    "tied": ("Llama", {**WIDE, "tie_word_embeddings": True}),
    "biases": ("Llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {**WIDE, "sliding_window": 12}),
    "qwen2": ("Qwen2", WIDE),
}
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((40, 25, 33, 12))]
# Mean over positions of the total variation distance to float32's distribution. Random weights of
# three layers react to noise far more than a trained model's.
BOUNDS = {"int8": 0.08, "int4": 0.5}


def distributions(folder: Path, **options: Any) -> torch.Tensor:
    """[positions, V] log-probabilities over all prompts and three tokens after each."""
    made = engine(folder, max_num_batched_tokens=24, **options)
    requests = [
        greedy(str(i), p, 1, logprobs=-1, prompt_logprobs=-1) for i, p in enumerate(PROMPTS)
    ]
    found = run(made, *requests)
    made.shutdown()
    return torch.cat([everything(found[r.id]) for r in requests])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.exp() - b.exp()).abs().sum(-1).mean() / 2)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_stay_near_float32(family: str, scheme: str, tmp_path: Path) -> None:
    model = make(*FAMILIES[family])
    model.save_pretrained(tmp_path)
    exact = torch.cat([reference(model, p, 1)[1] for p in PROMPTS])
    found = {
        d: distributions(tmp_path, device=d, quantization=scheme) for d in ("cpu", "reference")
    }
    assert found["cpu"].shape == exact.shape == (sum(map(len, PROMPTS)), VOCAB)
    far = distance(found["cpu"], exact)
    print(family, scheme, far, distance(found["cpu"], found["reference"]))
    assert 0 < far < BOUNDS[scheme]
    # The same codes up to ties: what is left between the two is far less than quantising costs.
    assert distance(found["cpu"], found["reference"]) < far / 3
    same = (found["cpu"].argmax(-1) == exact.argmax(-1)).double().mean()
    print(same)
    assert same > {"int8": 0.85, "int4": 0.5}[scheme]


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_int8_tokens_are_mostly_float32s(device: str, tmp_path: Path) -> None:
    model = make(*FAMILIES["llama"])
    model.save_pretrained(tmp_path)
    made = engine(tmp_path, device=device, quantization="int8")
    same = 0
    for i, prompt in enumerate(PROMPTS):
        tokens = tokens_of(run(made, greedy(str(i), prompt, 4))[str(i)])
        same += sum(a == b for a, b in zip(tokens, reference(model, prompt, 4)[0], strict=True))
    print(same)
    assert same >= 11  # of 16; one that differs takes those after it along


def test_facts_of_a_quantised_engine(tmp_path: Path) -> None:
    make(*FAMILIES["tied"]).save_pretrained(tmp_path)
    sizes = {}
    for device in ("cpu", "reference"):
        for scheme in (None, "int8", "int4"):
            made = engine(tmp_path, device=device, quantization=scheme)
            sizes[device, scheme] = made.info.weight_bytes
            assert made.info.numbers == (f"{scheme} over float32" if scheme else "float32")
            made.shutdown()
    for device in ("cpu", "reference"):
        assert sizes[device, "int4"] < sizes[device, "int8"] < sizes[device, None] * 0.4
