"""Tiny random models in the checkpoint format of transformers, and how to run them here and there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.core.config import EngineConfig
from octavo.core.engine import Engine
from octavo.core.entry.wiring import build_engine
from octavo.core.params import SamplingParams
from octavo.core.types import Request, SequenceUpdate

VOCAB = 101
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make(kind: str, changes: dict[str, Any]) -> Any:
    """A random model whose logits are far enough apart for greedy tokens to be certain."""
    import transformers  # heavy, and not needed to run what another process has made

    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**BASE | changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    dice = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=dice)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
    return model


def prompt_of(length: int, seed: int = 3) -> list[int]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=dice).tolist()


@torch.no_grad()
def reference(
    model: Any, prompt: list[int], count: int, guess: Sequence[int] = ()
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and log-probabilities [prompt + count - 1, V] of every position's successor.

    guess: what the tokens may be. Those that are the model's own are confirmed in one pass, as each
    follows from what is before it alone; from the first that is not, one pass finds one token."""
    tokens = list(prompt)
    if guess:
        best = model(torch.tensor([tokens + list(guess)]), use_cache=False).logits[0].argmax(-1)
        for guessed, own in zip(guess[:count], best[len(prompt) - 1 :].tolist(), strict=False):
            tokens.append(own)
            if guessed != own:
                break
    while len(tokens) < len(prompt) + count:
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
        tokens.append(int(logits[-1].argmax()))
    logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    return tokens[len(prompt) :], torch.log_softmax(logits.double(), -1)


@torch.no_grad()
def beam_scores(model: Any, request: Request) -> list[float]:
    """Scores of the texts that transformers' beam search finds, best first. No token ends one."""
    params, ids = request.params, request.prompt_token_ids
    wanted = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), do_sample=False,
        num_beams=params.width, num_return_sequences=params.n, max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty, early_stopping=params.early_stopping,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    return [float(score) for score in wanted.sequences_scores]


def engine(folder: Path, **options: Any) -> Engine:
    values = {"num_kv_blocks": 60, "device": "reference", "dtype": "float32", "max_logprobs": -1}
    return build_engine(EngineConfig.from_kwargs(model=folder, **{**values, **options}))


def run(made: Engine, *requests: Request) -> dict[str, list[SequenceUpdate]]:
    for request in requests:
        made.add(request)
    updates: dict[str, list[SequenceUpdate]] = {r.id: [] for r in requests}
    while made.has_unfinished():
        for update in made.step():
            updates[update.request_id].append(update)
        made.scheduler.check()
    return updates


def greedy(name: str, prompt: list[int], count: int, **params: Any) -> Request:
    values = {"temperature": 0.0, "max_tokens": count, **params}
    return Request(id=name, prompt_token_ids=prompt, params=SamplingParams(**values))


def tokens_of(updates: list[SequenceUpdate]) -> list[int]:
    assert updates[-1].finish_reason in ("length", "stop"), updates[-1]
    return [t for u in updates for t in u.token_ids]


def full(entries: list[Any]) -> torch.Tensor:
    """[positions, V] from entries that list the whole vocabulary."""
    out = torch.full((len(entries), VOCAB), float("nan"), dtype=torch.float64)
    for i, entry in enumerate(entries):
        out[i, entry.top_ids] = torch.tensor(entry.top_logprobs, dtype=torch.float64)
    return out


def everything(updates: list[SequenceUpdate]) -> torch.Tensor:
    prompt = [e for u in updates for e in u.prompt_logprobs or ()]
    return torch.cat([full(prompt), full([e for u in updates for e in u.logprobs or ()])])
