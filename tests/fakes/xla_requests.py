"""Requests of every kind that the XLA lane's engines serve, and their tokens."""

from __future__ import annotations

import tiny_models as tiny

from octavo.core.params import SamplingParams
from octavo.core.types import Request, SequenceUpdate

TIGHT = {"num_kv_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 128}
"""Room for so little that prompts come in chunks and sequences are preempted."""


def requests() -> list[Request]:
    begin = tiny.prompt_of(40, 7)
    return [
        tiny.greedy("long", tiny.prompt_of(20), 40),
        tiny.greedy("chunks", tiny.prompt_of(60, 4), 30),
        tiny.greedy("one token", tiny.prompt_of(1, 9), 50),
        tiny.greedy("first", begin, 5),
        tiny.greedy("same beginning", [*begin, 3, 4], 5),
        tiny.greedy("logprobs", tiny.prompt_of(30, 8), 5, logprobs=3, prompt_logprobs=2),
        Request(
            id="forks",
            prompt_token_ids=tiny.prompt_of(18, 5),
            params=SamplingParams(
                n=3, temperature=0.9, seed=5, max_tokens=12, top_k=20, top_p=0.95
            ),
        ),
        Request(
            id="changed logits",
            prompt_token_ids=tiny.prompt_of(18, 6),
            params=SamplingParams(
                temperature=1.2, seed=9, max_tokens=12, min_p=0.02,
                repetition_penalty=1.1, logit_bias={3: 2.0},
            ),
        ),
    ]  # fmt: skip


def tokens(updates: dict[str, list[SequenceUpdate]]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for name, of_request in updates.items():
        for update in of_request:
            assert update.finish_reason != "error", update.stop_reason
            found.setdefault((name, update.index), []).extend(update.token_ids)
    return found
