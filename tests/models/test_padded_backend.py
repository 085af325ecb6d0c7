"""A backend with static shapes, bucketed lanes and few rows of logits, over the whole engine."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny_models import engine, everything, greedy, prompt_of, reference, run, tokens_of

from octavo.core.config import ConfigError
from octavo.core.entry import wiring
from octavo.plugins import (
    Backend,
    Batch,
    ExecutionPlan,
    Lane,
    Limits,
    ModelShape,
    Probe,
    hookimpl,
)
from octavo.plugins.manager import Plugins

pytestmark = pytest.mark.usefixtures("one_thread")


class Padded(Backend):
    """Static shapes: every batch is padded to a bucket, as graph-replaying devices want it."""

    name = "padded"
    device_types = ("padded",)
    batches: ClassVar[list[Batch]] = []

    def probe(self) -> Probe:
        return Probe(devices=("padded",))

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        lane = Lane(
            max_seqs=8, max_tokens=32, chunk_multiple=4, token_buckets=(8, 32), seq_buckets=(4, 8),
            block_buckets=(4, 32), row_buckets=(4, 12),
        )  # fmt: skip
        return ExecutionPlan(16, (lane,), limits.dtype, limits.kv_dtype, max_logits_rows=12)

    def prepare(self, batch: Batch, prev: Any, device: str) -> Any:
        self.batches.append(batch)
        return super().prepare(batch, prev, device)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Batch]]:
    module = types.ModuleType("padded_plugin_for_test")
    module.octavo_backends = hookimpl(lambda: [Padded()])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = Plugins([metadata.EntryPoint("padded", module.__name__, "octavo")])
    monkeypatch.setattr(wiring, "plugins", lambda: found)
    Padded.batches.clear()
    yield Padded.batches
    Padded.batches.clear()


def test_padding_changes_nothing(llama: tuple[Path, Any], padded: list[Batch]) -> None:
    folder, model = llama
    made = engine(folder, device="padded", max_num_seqs=8)
    limits = made.scheduler.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (8, 32)
    assert [lane.chunk_multiple for lane in limits.lanes] == [4]
    requests = [greedy(f"r{i}", prompt_of(11 + 6 * i, seed=i), 9, logprobs=-1) for i in range(6)]
    requests.append(greedy("p", prompt_of(40), 3, logprobs=-1, prompt_logprobs=-1))
    found = run(made, *requests)
    for r in requests:
        count = r.params.max_tokens or 0
        tokens, logprobs = reference(model, r.prompt_token_ids, count)
        assert tokens_of(found[r.id]) == tokens
        got = everything(found[r.id])
        torch.testing.assert_close(got, logprobs[-len(got) :], atol=1e-4, rtol=0)
    assert {len(b.token_ids) for b in padded} == {8, 32}
    assert {len(b.context_lens) for b in padded} == {4, 8}
    assert {b.block_tables[0].shape[1] for b in padded} <= {4, 32}
    assert {len(b.logits_rows) for b in padded} == {4, 12}
    assert any(b.num_tokens < len(b.token_ids) for b in padded)


def test_a_backend_with_too_few_rows_is_refused_at_the_start(
    llama: tuple[Path, Any], padded: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ExecutionPlan(16, (Lane(max_seqs=64),), "float32", "float32", max_logits_rows=9)
    monkeypatch.setattr(Padded, "plan", lambda *_: plan)
    with pytest.raises(ConfigError, match=r"9 rows of logits.*--max-num-seqs 8 or less"):
        engine(llama[0], device="padded", max_num_seqs=20)
    assert engine(llama[0], device="padded", max_num_seqs=8).info.max_num_seqs == 8


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (ExecutionPlan(24, (Lane(),), "float32", "float32"), "block-size 24"),
        (ExecutionPlan(16, (Lane(), Lane()), "float32", "float32"), "lanes 0 and 1 both take prefill"),
        (ExecutionPlan(16, (Lane(kinds=("decode",)),), "float32", "float32"), "no lane takes prompts"),
        (ExecutionPlan(16, (Lane(),), "float32", "float32", world_size=2), "asks for 2 ranks"),
        (ExecutionPlan(16, (Lane(),), "float32", "float32", layout="spmd"), "spmd"),
    ],
)  # fmt: skip
def test_plans_are_validated(
    llama: tuple[Path, Any],
    padded: list[Batch],
    monkeypatch: pytest.MonkeyPatch,
    plan: ExecutionPlan,
    words: str,
) -> None:
    monkeypatch.setattr(Padded, "plan", lambda *_: plan)
    with pytest.raises(ConfigError, match=words):
        engine(llama[0], device="padded")
