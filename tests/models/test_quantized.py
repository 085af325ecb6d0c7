"""Tiny models with int8 and int4 weights, end to end: how far from float32, and CPU against reference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, engine, everything, greedy, make, prompt_of, reference, run

from octavo.core.quantization import form

WIDE = {"hidden_size": 64, "intermediate_size": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", WIDE),
    "tied": ("Llama", {**WIDE, "tie_word_embeddings": True}),
    "biases": ("Llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {**WIDE, "sliding_window": 12}),
    "qwen2": ("Qwen2", WIDE),
}
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((40, 25, 33, 12))]
# Mean over positions of the total variation distance between distributions, of a random model with
# three layers, which reacts to noise far more than a trained one.
FROM_FLOAT32 = {"int8": 0.1, "int4": 0.5}
FROM_ROUNDED_WEIGHTS = 0.06  # what activations and the float16 cache add


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


@torch.no_grad()
def rounded(model: Any, scheme: str) -> Any:
    """A copy whose weights have the values that the scheme's codes stand for."""
    made = copy.deepcopy(model)
    for name, weight in made.named_parameters():
        if weight.ndim == 2:
            four = scheme == "int4" and "proj" in name
            kind = form("int4" if four else "int8")
            weight.copy_(kind.dequantize(kind.quantize(weight, 32 if four else 0)))
    return made


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_stay_near_float32(family: str, scheme: str, tmp_path: Path) -> None:
    model = make(*FAMILIES[family])
    model.save_pretrained(tmp_path)
    exact = torch.cat([reference(model, p, 1)[1] for p in PROMPTS])
    known = torch.cat([reference(rounded(model, scheme), p, 1)[1] for p in PROMPTS])
    found = {
        d: distributions(tmp_path, device=d, quantization=scheme) for d in ("cpu", "reference")
    }
    assert found["cpu"].shape == exact.shape == (sum(map(len, PROMPTS)), VOCAB)
    far, near = distance(found["cpu"], exact), distance(found["cpu"], known)
    assert 0 < far < FROM_FLOAT32[scheme] and near < FROM_ROUNDED_WEIGHTS
    # The same codes up to ties: what is left between the two is far less than quantising costs.
    assert distance(found["cpu"], found["reference"]) < far / 20
    same = (found["cpu"].argmax(-1) == known.argmax(-1)).double().mean()
    assert same > 0.8


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
