"""The whole engine on XLA's CPU device: the reference backend's tokens, and no program more than needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
from xla_requests import TIGHT, requests, tokens

from octavo.backends.xla import bridge
from octavo.core.engine import Engine
from octavo.core.types import SequenceUpdate

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grouped heads": ("Llama", {}, {}),
    "one KV head, tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}, {}),
    "odd head size": ("Llama", {"head_dim": 20, "num_key_value_heads": 4}, {}),
    "windows": ("Mistral", {"sliding_window": 11}, {}),
    "biases": ("Qwen2", {}, {}),
    "pairs of bfloat16": ("Llama", {}, {"kv_cache_dtype": "bfloat16"}),
}


def logprobs(updates: dict[str, list[SequenceUpdate]]) -> list[float]:
    of_request = updates["logprobs"]
    entries = [e for u in of_request for e in (*(u.prompt_logprobs or ()), *(u.logprobs or ()))]
    return [value for entry in entries for value in (entry.logprob, *entry.top_logprobs)]


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, changes, options = MODELS[request.param]
    folder: Path = tmp_path_factory.mktemp("model")
    tiny.make(kind, changes).save_pretrained(folder)
    return [
        tiny.engine(folder, device=device, **TIGHT, **options)
        for device in ("reference", "xla:cpu")
    ]


def test_the_references_tokens_and_no_recompile(pair: list[Engine]) -> None:
    reference, engine = pair
    wanted = tiny.run(reference, *requests())
    runner: Any = engine._runner
    warm, built = bridge.compilations(), runner.compilations
    assert built > 0
    got = tiny.run(engine, *requests())
    assert tokens(got) == tokens(wanted)
    assert logprobs(got) == pytest.approx(logprobs(wanted), rel=1e-3, abs=2e-3)
    timings = [u.timings for of_request in got.values() for u in of_request if u.timings]
    assert sum(t.num_preemptions for t in timings) > 0, "nothing was preempted"

    again = tiny.run(engine, *requests())  # with the prefixes of the first run in the cache
    assert tokens(again) == tokens(wanted)
    assert sum(u.num_cached_tokens for of_request in again.values() for u in of_request) > 0
    assert bridge.compilations() == warm, "a step compiled"
    assert runner.compilations == built
    assert not bridge.fallbacks(), "operations ran on the host"


def test_a_program_holds_no_weights(pair: list[Engine]) -> None:
    """They are handed in at every step, so a closed engine lets them go."""
    engine = pair[1]
    runner: Any = engine._runner
    buckets = list(runner._forward._buckets.values())
    assert buckets
    for bucket in buckets:
        assert sum(constant.numel() for constant in bucket.program.constants) < 100


def test_the_step_writes_the_cache_in_place(pair: list[Engine]) -> None:
    engine = pair[1]
    runner: Any = engine._runner
    before = runner.kv[0].data
    tiny.run(engine, tiny.greedy("x", tiny.prompt_of(5), 2))
    with pytest.raises(RuntimeError):
        before.cpu()  # its memory is the new cache's
    assert runner.kv[0].data.cpu().isfinite().all()


def test_a_cache_lost_in_a_failed_step_is_made_anew(pair: list[Engine]) -> None:
    """A step that fails after it has taken the cache over leaves none; whoever else runs starts again."""
    engine = pair[1]
    runner: Any = engine._runner
    step = runner._forward
    request = tiny.greedy("again", tiny.prompt_of(20), 8)
    wanted = tiny.tokens_of(tiny.run(engine, request)["again"])

    def fails(weights: Any, kv: Any, inputs: Any) -> Any:
        runner._forward = step
        step(weights, kv, inputs)
        raise RuntimeError("the chip is gone")

    runner._forward = fails
    broken = tiny.run(engine, tiny.greedy("x", tiny.prompt_of(9), 3))
    assert broken["x"][-1].finish_reason == "error"
    assert tiny.tokens_of(tiny.run(engine, request)["again"]) == wanted
