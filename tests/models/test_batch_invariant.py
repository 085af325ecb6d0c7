"""`--batch-invariant`: a request's log-probabilities have the same bits alone, in any batch, in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import make, prompt_of

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.entry.wiring import build_engine
from octavo.core.params import SamplingParams
from octavo.core.types import Request

LENGTHS = (3, 17, 33, 70, 8, 64, 1, 29)


def bits(folder: Path, prompts: list[list[int]], **options: Any) -> list[list[tuple[int, str]]]:
    """Each request's tokens and log-probabilities, as hexadecimal so that every bit counts."""
    options = {"device": "cpu", "num_kv_blocks": 100, "batch_invariant": True} | options
    engine = build_engine(EngineConfig(model=str(folder), **options))
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=str(i), prompt_token_ids=prompt, params=params))
    found: list[list[tuple[int, str]]] = [[] for _ in prompts]
    while engine.has_unfinished():
        for update in engine.step():
            for entry in update.logprobs or ():
                found[int(update.request_id)].append((entry.token_id, entry.logprob.hex()))
    engine.shutdown()
    return found


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
@pytest.mark.parametrize(
    ("scheme", "threads"), [(None, 1), (None, 2), ("int8", 1), ("int8", 2), ("int4", 2)]
)
def test_bits_do_not_depend_on_company_or_chunks(
    kind: str, scheme: str | None, threads: int, tmp_path: Path
) -> None:
    # Wide enough that one row alone would be summed in another order.
    changes = {"hidden_size": 96, "intermediate_size": 2048, "num_attention_heads": 6}
    if kind == "Mistral":
        changes["sliding_window"] = 20
    make(kind, changes).save_pretrained(tmp_path)
    how: dict[str, Any] = {"threads": threads, "quantization": scheme}
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = [bits(tmp_path, [prompt], **how)[0] for prompt in prompts]
    assert all(len(entries) == 12 for entries in alone)
    assert bits(tmp_path, prompts, **how) == alone
    assert bits(tmp_path, prompts, **how, max_num_batched_tokens=13) == alone
    assert bits(tmp_path, prompts[::-1], **how, max_num_seqs=3)[::-1] == alone
    tight = bits(tmp_path, prompts, **how, num_kv_blocks=9)  # preempted and recomputed
    assert tight == alone


def test_a_device_without_it_says_so(tmp_path: Path) -> None:
    make("Llama", {}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"reference.*does not offer --batch-invariant"):
        bits(tmp_path, [[1]], device="reference")
