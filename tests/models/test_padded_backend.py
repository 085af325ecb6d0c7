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
from sentence_models import embed, encoder, expected, numbers, save
from tiny_models import engine, everything, greedy, prompt_of, reference, run, tokens_of

from octavo.core.config import ConfigError
from octavo.core.entry import wiring
from octavo.core.params import RequestRefused
from octavo.plugins import (
    Backend,
    Batch,
    Capabilities,
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
        tokens, logprobs = reference(model, r.prompt_token_ids, count, tokens_of(found[r.id]))
        assert tokens_of(found[r.id]) == tokens
        got = everything(found[r.id])
        torch.testing.assert_close(got, logprobs[-len(got) :], atol=1e-4, rtol=0)
    assert {len(b.token_ids) for b in padded} == {8, 32}
    assert {len(b.context_lens) for b in padded} == {4, 8}
    assert {b.block_tables[0].shape[1] for b in padded} <= {4, 32}
    assert {len(b.logits_rows) for b in padded} == {4, 12}
    assert any(b.num_tokens < len(b.token_ids) for b in padded)


@pytest.mark.parametrize("kind", ["mean", "last", "cls"])
def test_padding_is_no_part_of_an_embedding(
    llama: tuple[Path, Any], padded: list[Batch], kind: str
) -> None:
    folder, model = llama
    made = engine(folder, device="padded", max_num_seqs=8)
    requests = [embed(f"e{i}", prompt_of(11 + 13 * i, seed=i), kind) for i in range(4)]
    talk = [greedy(f"t{i}", prompt_of(9 + i, seed=i), 6) for i in range(3)]
    found = run(made, *requests, *talk)
    for r in requests:
        wanted = expected(model.model, r.prompt_token_ids, kind)
        got = numbers(found[r.id][0].embedding)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    for r in talk:
        assert tokens_of(found[r.id]) == reference(model, r.prompt_token_ids, 6)[0]
    assert any(b.num_tokens < len(b.token_ids) for b in padded)


def test_encoders_run_where_a_backend_says_that_they_can(
    tmp_path: Path, padded: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder("Bert")
    save(model, tmp_path)
    with pytest.raises(ConfigError, match="padded has no attention for encoders"):
        engine(tmp_path, device="padded", num_kv_blocks=None)
    monkeypatch.setattr(Padded, "capabilities", lambda *_: Capabilities(encoders=True))
    made = engine(tmp_path, device="padded", num_kv_blocks=None, max_num_seqs=8)
    assert made.info.embedding is not None and made.info.embedding.max_tokens == 32
    requests = [
        embed(f"e{n}", [2 + t % 99 for t in prompt_of(n)], "mean") for n in (3, 7, 30, 11, 32)
    ]
    found = run(made, *requests)
    for r in requests:
        wanted = expected(model, r.prompt_token_ids, "mean")
        got = numbers(found[r.id][0].embedding)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(RequestRefused, match="33 tokens"):
        made.add(embed("long", prompt_of(33), "mean"))


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
