"""What every backend over a vendor's package does through the whole engine, whichever stand-in it runs on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from tiny_models import engine, full, greedy, prompt_of, reference, run, tokens_of

Build = Callable[..., Any]
"""Makes an engine on the vendor's device: (folder of a model, options)."""


def requests_of(case: int, count: int = 6) -> list[Any]:
    """Prompts of all lengths around a block's, some with a beginning in common, some with two samples."""
    dice = random.Random(case)
    common = prompt_of(400, seed=case)
    found = []
    for i in range(count):
        prompt = common[: dice.choice([0, 20, 128, 140, 300])]
        prompt = prompt + prompt_of(dice.randint(1, 8), seed=i)
        wanted = {"n": dice.choice([1, 1, 2]), "prompt_logprobs": -1 if i == 0 else None}
        found.append(greedy(f"r{i}", prompt, dice.randint(6, 20), logprobs=-1, **wanted))
    return found


def gives_what_transformers_gives(made: Any, model: Any) -> None:
    """Tokens and log-probabilities, with forks and copy-on-write; a second time from cached prefixes."""
    requests = requests_of(1)
    first = run(made, *requests)
    second = run(made, *(msgspec.structs.replace(r, id=r.id + " again") for r in requests))
    for r in requests:
        guess = tokens_of([u for u in first[r.id] if u.index == 0])
        wanted, logprobs = reference(model, r.prompt_token_ids, r.params.max_tokens or 0, guess)
        behind = len(r.prompt_token_ids) - 1
        for updates in (first[r.id], second[r.id + " again"]):
            for index in range(r.params.n):
                mine = [u for u in updates if u.index == index]
                assert tokens_of(mine) == wanted
                got = full([e for u in mine for e in u.logprobs or ()])
                torch.testing.assert_close(got, logprobs[behind:], atol=2e-4, rtol=1e-4)
    stats = made.stats()
    assert stats.prefix_hit_tokens > 0 and stats.kv_blocks_used == 0


def gives_tokens(made: Any, model: Any, lengths: Sequence[int], count: int) -> None:
    """Those of transformers, `count` for each prompt."""
    requests = [greedy(f"r{i}", prompt_of(n, seed=i), count) for i, n in enumerate(lengths)]
    found = run(made, *requests)
    for r in requests:
        tokens = tokens_of(found[r.id])
        assert tokens == reference(model, r.prompt_token_ids, count, tokens)[0]


def gives_the_references_bfloat16(build: Build, folder: Path) -> None:
    """The same tokens while the reference's first two choices are further apart than bfloat16's noise."""
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


def gives_the_references_draws(build: Build, folder: Path) -> None:
    """Of seeded requests."""
    requests = [
        greedy(f"r{i}", prompt_of(20, seed=i), 8, temperature=0.9, seed=i, top_k=20, top_p=0.9)
        for i in range(4)
    ]
    ours = run(build(folder), *requests)
    theirs = run(engine(folder, device="reference"), *requests)
    assert all(tokens_of(ours[r.id]) == tokens_of(theirs[r.id]) for r in requests)
