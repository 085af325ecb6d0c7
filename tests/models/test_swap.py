"""Blocks in host memory over whole engines: an interrupted run gives what an uninterrupted one gives, token
for token, and an evicted prefix that comes back is the one that went."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import broken_backends
import pytest
import torch
from byte_model import byte_llama
from tiny_models import engine, prompt_of, run, tokens_of

from octavo import AsyncLLM
from octavo.core import ops as portable
from octavo.core.config import ConfigError, EngineConfig
from octavo.core.engine import Engine
from octavo.core.entry.wiring import build_engine, resolve_model
from octavo.core.params import SamplingParams
from octavo.core.types import Request
from octavo.plugins import Backend, Ops
from octavo.plugins.conformance.engine_cases import engine as engine_on

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = {"swap_space": 0.05, "preemption_mode": "swap"}


def asked() -> list[Request]:
    """Greedy, seeded and n = 2 requests, of one block to five."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.9, "seed": 4, "n": 2},
        {"temperature": 1.0, "seed": 8, "n": 3, "logprobs": 2},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    return [
        Request(
            id=f"r{i}",
            prompt_token_ids=prompt_of(9 + 15 * i, seed=i),
            params=SamplingParams(max_tokens=30, ignore_eos=True, **way),
        )
        for i, way in enumerate(ways)
    ]


def texts(made: Engine, requests: Sequence[Request]) -> dict[tuple[str, int], list[int]]:
    """Every sample's tokens, with the books audited after each step."""
    found: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        made.add(request)
    while made.has_unfinished():
        for update in made.step():
            assert update.finish_reason != "error", update.stop_reason
            found.setdefault((update.request_id, update.index), []).extend(update.token_ids)
        made.scheduler.check()
    assert made.stats().kv_blocks_used == 0
    return found


@cache
def uninterrupted(folder: Path, **options: Any) -> dict[tuple[str, int], list[int]]:
    made = engine(folder, num_kv_blocks=400, enable_prefix_caching=False, **options)
    found: dict[tuple[str, int], list[int]] = {}
    for request in asked():
        found |= texts(made, [request])
    assert made.stats().preemptions == 0
    made.shutdown()
    return found


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("device", "kv_cache_dtype", "caching"),
    [
        ("cpu", "float32", True),
        ("cpu", "int8", False),
        pytest.param("cpu", "float32", False, marks=slow),
        pytest.param("cpu", "int8", True, marks=slow),
        pytest.param("cpu", "float16", True, marks=slow),
        pytest.param("reference", "float32", True, marks=slow),
        pytest.param("reference", "float32", False, marks=slow),
    ],
)
def test_swapped_out_and_in_again(
    llama: tuple[Path, Any], device: str, kv_cache_dtype: str, caching: bool
) -> None:
    numbers = {"device": device, "kv_cache_dtype": kv_cache_dtype, "max_model_len": 128}
    made = engine(
        llama[0], **numbers, **HOST, num_kv_blocks=14, max_num_batched_tokens=24,
        enable_prefix_caching=caching,
    )  # fmt: skip
    found = texts(made, asked())
    stats = made.stats()
    made.shutdown()
    assert found == uninterrupted(llama[0], **numbers)
    assert stats.swaps == stats.preemptions > 0
    assert stats.swapped_in_blocks > 0


@pytest.mark.parametrize("device", [pytest.param("reference", marks=slow), "cpu"])
def test_an_evicted_prefix_comes_back_from_the_host(llama: tuple[Path, Any], device: str) -> None:
    made = engine(llama[0], device=device, num_kv_blocks=9, max_model_len=120, swap_space=0.05)
    first, second = prompt_of(80, seed=1), prompt_of(81, seed=2)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=0)
    cold, warm = [], []
    for found, name in ((cold, "cold"), (warm, "warm")):
        for i, prompt in enumerate((first, second)):
            request = Request(id=f"{name}{i}", prompt_token_ids=prompt, params=params)
            found.append(run(made, request)[request.id])
    assert [tokens_of(updates) for updates in cold] == [tokens_of(updates) for updates in warm]
    assert [updates[-1].num_cached_tokens for updates in (*cold, *warm)] == [0, 0, 64, 80]
    assert made.stats().host_hit_tokens > 0
    made.scheduler.check()
    made.shutdown()


# ------------------------------------------------------------------------------ copies that take time


class Late:
    """An export that is read when it ends, and knows whether its blocks were written until then."""

    def __init__(self, handles: list[Any], ids: Sequence[int]) -> None:
        self._handles, self._ids = handles, list(ids)
        self._before = portable.export_blocks(handles, ids)
        self._found: torch.Tensor | None = None

    def done(self) -> bool:
        return self._found is not None

    def wait(self) -> torch.Tensor:
        if self._found is None:
            self._found = portable.export_blocks(self._handles, self._ids)
            assert torch.equal(self._found, self._before), "written while they were copied out"
        return self._found


class LateOps(Ops):
    def export_blocks(self, handles: list[Any], ids: Sequence[int]) -> Late:
        return Late(handles, ids)


class LateBackend(broken_backends.Sound):
    def ops(self, device: str) -> Ops:
        return LateOps()


def test_where_prompts_are_computed_whole(llama: tuple[Path, Any]) -> None:
    """What comes back goes on in the lane that decodes."""
    options = {"num_kv_blocks": 14, "max_model_len": 128}
    with engine_on(broken_backends.TwoLanes(), "sound", llama[0], **HOST, **options) as made:
        found = texts(made, asked()[:4])  # it has too few rows for logits of a whole prompt
        stats = made.stats()
    assert stats.swaps == stats.preemptions > 0
    wanted = uninterrupted(llama[0], device="reference", max_model_len=128)
    assert found == {key: tokens for key, tokens in wanted.items() if key in found}


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
def test_no_block_is_written_while_it_is_copied_out(llama: tuple[Path, Any], caching: bool) -> None:
    options = {"num_kv_blocks": 14, "max_num_batched_tokens": 24, "max_model_len": 128}
    with engine_on(
        LateBackend(), "sound", llama[0], **HOST, **options, enable_prefix_caching=caching
    ) as made:
        found = texts(made, asked())
        assert made.stats().swaps > 0
    assert found == uninterrupted(llama[0], device="reference", max_model_len=128)


# -------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("backend", "space", "words"),
    [
        (
            broken_backends.WithoutSwap(),
            1,
            r"--swap-space 1: backend 'sound' on sound cannot move KV blocks .*leave it",
        ),
        (broken_backends.Sound(), 1e5, r"--swap-space 100000: .* are free .*use at most \d"),
        (broken_backends.Sound(), 1e-6, r"--swap-space 1e-06: a KV block takes \d.*give at least"),
    ],
)
def test_what_a_device_cannot_do_is_an_error_at_the_start(
    llama: tuple[Path, Any], backend: Backend, space: float, words: str
) -> None:
    with (
        pytest.raises(ConfigError, match=words),
        engine_on(backend, "sound", llama[0], num_kv_blocks=20, swap_space=space),
    ):
        pass


# ----------------------------------------------------------------------------------- real English


def smollm2(requests: Sequence[Request], **options: Any) -> tuple[dict[Any, list[int]], Any]:
    config = EngineConfig(
        device="cpu", dtype="float32", load_progress=False, max_model_len=256, **options
    )
    made = build_engine(config, files=resolve_model(config))
    try:
        return texts(made, requests), made.stats()
    finally:
        made.shutdown()


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=slow)])
def test_smollm2_goes_on_where_it_was(caching: bool) -> None:
    golden = json.loads((Path(__file__).parent / "golden_smollm2.json").read_text("utf-8"))
    entries = [e for e in golden["prompts"] if 20 <= len(e["prompt"]) <= 150][:4]
    requests = [
        Request(
            id=entry["name"],
            prompt_token_ids=entry["prompt"],
            params=SamplingParams(
                max_tokens=24, ignore_eos=True, n=1 + i % 2,
                temperature=0.8 * (i % 2), seed=None if i % 2 == 0 else i,
            ),
        )
        for i, entry in enumerate(entries)
    ]  # fmt: skip
    wanted, _ = smollm2(requests, num_kv_blocks=200)
    need = max(-(-(len(r.prompt_token_ids) + 24) // 16) for r in requests)
    found, stats = smollm2(
        requests, num_kv_blocks=max(need, 16) + 4, enable_prefix_caching=caching,
        swap_space=0.25, preemption_mode="swap", max_num_batched_tokens=64,
    )  # fmt: skip
    assert found == wanted
    assert stats.swaps > 0


@slow
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    folder = byte_llama(tmp_path)
    prompts = ["what comes first " * 2, "the names of names ", "names " * 9]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)

    async def all_of(**options: Any) -> tuple[list[str], dict[str, Any]]:
        config = EngineConfig(
            model=str(folder), device="cpu", dtype="float32", max_model_len=120,
            load_progress=False, **options,
        )  # fmt: skip

        async def one(llm: AsyncLLM, prompt: str) -> str:
            async for output in llm.generate(prompt, params):
                text = output.outputs[0].text
            return text

        async with AsyncLLM.from_config(config) as llm:
            found = await asyncio.gather(*(one(llm, prompt) for prompt in prompts))
            return found, await llm.stats()

    wanted, _ = asyncio.run(all_of(num_kv_blocks=100))
    found, stats = asyncio.run(all_of(num_kv_blocks=11, **HOST))
    assert found == wanted
    assert stats["swaps"] > 0
