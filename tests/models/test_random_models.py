"""Random models, requests and limits on the CPU kernels: chunks, preemption, prefix hits, samples, windows.

Each case is drawn from its number, so a failure repeats.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from model_variants import random_model
from tiny_models import engine, full, greedy, prompt_of, reference, run, tokens_of

from octavo.core.config import ConfigError
from octavo.core.types import SequenceUpdate

pytestmark = pytest.mark.usefixtures("one_thread")


def sample_of(updates: list[SequenceUpdate], index: int) -> list[SequenceUpdate]:
    return [u for u in updates if u.index == index]


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2"])
@pytest.mark.parametrize("case", range(3))
def test_greedy_tokens_are_those_of_transformers(kind: str, case: int, tmp_path: Path) -> None:
    dice = random.Random(f"{kind} {case}")
    model = random_model(dice, kind)
    model.save_pretrained(tmp_path)
    tight = case < 2
    made = engine(
        tmp_path,
        device="cpu",
        num_kv_blocks=7 if tight else 200,
        block_size=16 if tight else dice.choice([16, 32, 48]),
        max_num_batched_tokens=dice.choice([5, 16, 33]) if tight else dice.choice([3, 512]),
        max_num_seqs=dice.choice([4, 8]),
    )
    common = prompt_of(100, seed=case)
    shared = [0, 16, 20, 35] if tight else [20, 49, 97]
    requests = []
    for i in range(6):
        prompt = common[: dice.choice(shared)] + prompt_of(dice.randint(1, 8), seed=i)
        requests.append(
            greedy(f"r{i}", prompt, dice.randint(20, 40), n=dice.choice([1, 1, 2]), logprobs=-1,
                   prompt_logprobs=-1 if dice.random() < 0.3 else None)
        )  # fmt: skip
    first = run(made, *requests)
    second = run(made, *(msgspec.structs.replace(r, id=r.id + " again") for r in requests))
    for r in requests:
        guess = tokens_of(sample_of(first[r.id], 0))
        tokens, logprobs = reference(model, r.prompt_token_ids, r.params.max_tokens or 0, guess)
        behind = len(r.prompt_token_ids) - 1
        for updates in (first[r.id], second[r.id + " again"]):
            for index in range(r.params.n):
                mine = sample_of(updates, index)
                assert tokens_of(mine) == tokens
                got = full([e for u in mine for e in u.logprobs or ()])
                torch.testing.assert_close(got, logprobs[behind:], atol=2e-4, rtol=1e-4)
            entries = [e for u in updates for e in u.prompt_logprobs or ()]
            if r.params.prompt_logprobs is not None and behind:
                torch.testing.assert_close(full(entries), logprobs[:behind], atol=2e-4, rtol=1e-4)
    stats = made.stats()
    assert (stats.preemptions > 0) == tight
    assert stats.prefix_hit_tokens > 0 and stats.kv_blocks_used == 0
    made.shutdown()


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "half"])
def test_half_precision_is_no_further_from_float32_than_transformers_own(
    llama: tuple[Path, Any], dtype: str, kv_dtype: str
) -> None:
    """Every position's whole distribution over a prompt, in chunks; the cache alone in half, or all."""
    folder, model = llama
    dtype = kv_dtype if dtype == "half" else dtype
    prompt = prompt_of(100)
    exact = reference(model, prompt, 1)[1][:-1]
    theirs = reference(copy.deepcopy(model).to(getattr(torch, kv_dtype)), prompt, 1)[1][:-1]
    made = engine(
        folder, device="cpu", dtype=dtype, kv_cache_dtype=kv_dtype, max_num_batched_tokens=24
    )
    assert (made.info.dtype, made.info.kv_dtype) == (dtype, kv_dtype)
    updates = run(made, greedy("r", prompt, 1, prompt_logprobs=-1))["r"]
    got = full([e for u in updates for e in u.prompt_logprobs or ()])
    ours, bound = (got - exact).abs(), (theirs - exact).abs()
    assert 0 < ours.mean() < 1.2 * bound.mean() and ours.max() < 1.5 * bound.max()
    assert got.exp().sum(-1).sub(1).abs().max() < 1e-3


def test_an_int8_cache_is_close_to_float32(llama: tuple[Path, Any]) -> None:
    """Over a prompt in chunks; its error is bounded by that of bfloat16 weights and cache."""
    folder, model = llama
    prompt = prompt_of(100)
    exact = reference(model, prompt, 1)[1][:-1]
    theirs = reference(copy.deepcopy(model).to(torch.bfloat16), prompt, 1)[1][:-1]
    made = engine(
        folder, device="cpu", dtype="float32", kv_cache_dtype="int8", max_num_batched_tokens=24
    )
    assert made.info.kv_dtype == "int8"
    plain = engine(folder, device="cpu", dtype="float32", kv_cache_dtype="float32")
    assert made.info.kv_bytes / made.info.num_kv_blocks < 0.5 * (
        plain.info.kv_bytes / plain.info.num_kv_blocks
    )
    updates = run(made, greedy("r", prompt, 1, prompt_logprobs=-1))["r"]
    got = full([e for u in updates for e in u.prompt_logprobs or ()])
    ours, bound = (got - exact).abs(), (theirs - exact).abs()
    assert 0 < ours.mean() < bound.mean() and ours.max() < 1.5 * bound.max()


def test_an_int8_cache_is_refused_where_there_is_none(llama: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match=r"kv-cache-dtype int8 is not offered by reference"):
        engine(llama[0], device="reference", kv_cache_dtype="int8")
