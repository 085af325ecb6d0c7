"""The same weights in transformers: what Octavo's answers and speed are held against.

The model is built from our own reading of the configuration and our own tensors, so a GGUF file
needs none of transformers' slow way through it, and both engines compute with the same bits. What
this cannot show, a fault in reading the file itself, the loading tests do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.loading.files import ModelFiles

if TYPE_CHECKING:
    import torch


def load_transformers(files: ModelFiles, device: str = "cpu") -> Any:
    """A transformers causal language model with the weights of `files`, float32, on a torch device.

    Raises:
        RuntimeError: a tensor that the model needs is missing, or one is left over.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from octavo.core.loading.hf_config import load_config
    from octavo.core.loading.weights import open_weights

    if files.kind == "folder":
        model = AutoModelForCausalLM.from_pretrained(
            files.path, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        return model.to(device).eval()
    values = dict(load_config(files))
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    source = open_weights(files)
    try:
        state = {name: source.get(name) for name in source.names()}
        left = model.load_state_dict(state, strict=False)
    finally:
        source.close()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing = set(left.missing_keys) - tied
    if missing or left.unexpected_keys:
        raise RuntimeError(
            f"transformers' {type(model).__name__} lacks {sorted(missing)} "
            f"and has no place for {left.unexpected_keys}"
        )
    model.tie_weights()
    return model.to(device).eval()


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy tokens, and per step how far the best logit lies above the second."""

    tokens: list[int]
    margins: list[float]


def greedy(
    model: Any, prompt_token_ids: Sequence[int], count: int, *, margins: bool = False
) -> Greedy:
    """`count` greedy tokens after a prompt by `generate()`, whatever the tokens are.

    No token may end it. `min_new_tokens` would not do: it forbids the end-of-text token, where
    `ignore_eos` lets it come and goes on.

    Raises:
        RuntimeError: it ended early all the same.
    """
    import torch

    # What a call's own configuration leaves at None is taken from the model's.
    model.generation_config.eos_token_id = None

    ids = torch.tensor([list(prompt_token_ids)], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=_greedy_config(model, count, margins),
        )
    tokens: list[int] = out.sequences[0, ids.shape[1] :].tolist()
    if len(tokens) != count:
        raise RuntimeError(f"transformers ended after {len(tokens)} of {count} tokens")
    return Greedy(tokens, [_margin(row[0]) for row in out.logits] if margins else [])


def _greedy_config(model: Any, count: int, logits: bool) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=logits,
    )


def _margin(row: torch.Tensor) -> float:
    best, second = row.float().topk(2).values.tolist()
    return float(best - second)


def margin_after(model: Any, token_ids: Sequence[int]) -> float:
    """How far the best logit lies above the second after these tokens."""
    import torch

    with torch.inference_mode():
        logits = model(
            torch.tensor([list(token_ids)], device=model.device), logits_to_keep=1
        ).logits
    return _margin(logits[0, -1])


def log_softmax(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [T, V] float32 of what follows each of `token_ids`."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([list(token_ids)], device=model.device)).logits
    return torch.log_softmax(logits[0].float(), -1).cpu()
