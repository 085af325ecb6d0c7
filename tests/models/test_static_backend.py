"""A backend of static shapes over the whole engine: lanes of its own for prompts and decoding, buckets
for everything, bfloat16 logits, KV handles that are gone once they were given away, late frees."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from sentence_models import embed
from tiny_models import beam_scores, engine, greedy, prompt_of, run, tokens_of

from octavo.core.config import ConfigError
from octavo.core.entry import wiring
from octavo.core.params import ParamError
from octavo.core.types import Request
from octavo.plugins import (
    Backend,
    Capabilities,
    ExecutionPlan,
    Lane,
    Limits,
    ModelShape,
    Ops,
    Probe,
    Program,
    SampleInputs,
    StepOut,
    hookimpl,
)
from octavo.plugins.manager import Plugins

pytestmark = pytest.mark.usefixtures("one_thread")


class Donated:
    """A layer's cache. Whoever is given it takes what it holds; touching it afterwards raises."""

    def __init__(self, pair: Any) -> None:
        self._pair = pair

    @property
    def lost(self) -> bool:
        return self._pair is None

    def take(self) -> Any:
        assert self._pair is not None, "a handle was used that had been given away"
        pair, self._pair = self._pair, None
        return pair

    def look(self) -> Any:
        assert self._pair is not None, "a handle was read that had been given away"
        return self._pair


class DonatingOps(Ops):
    fail_in_layer: ClassVar[int | None] = None
    writes: ClassVar[int] = 0

    def alloc_kv(self, groups: Any, num_blocks: int, block_size: int) -> list[Any]:
        return [Donated(pair) for pair in super().alloc_kv(groups, num_blocks, block_size)]

    def kv_lost(self, handles: list[Any]) -> bool:
        return any(handle.lost for handle in handles)

    def write_kv(self, handle: Any, k: Any, v: Any, meta: Any, group: int = 0) -> Any:
        pair = handle.take()
        DonatingOps.writes += 1
        if DonatingOps.writes == self.fail_in_layer:
            raise RuntimeError("the device fell over")
        return Donated(super().write_kv(pair, k, v, meta, group))

    def copy_blocks(self, handles: list[Any], pairs: Sequence[tuple[int, int]]) -> list[Any]:
        return [Donated(p) for p in super().copy_blocks([h.take() for h in handles], pairs)]

    def paged_attention(self, q: Any, handle: Any, meta: Any, **options: Any) -> Any:
        return super().paged_attention(q, handle.look(), meta, **options)


class Compiled:
    """Runs a program, and builds it anew for every shape it has not seen."""

    def __init__(self, program: Program, cast: bool) -> None:
        self._fn, self._cast = program.fn, cast
        self.shapes: set[tuple[Any, ...]] = set()

    @property
    def compilations(self) -> int:
        return len(self.shapes)

    def __call__(self, *args: Any) -> Any:
        if self._cast:
            batch = args[2].batch
            table = batch.block_tables[0].shape
            sizes = (len(batch.token_ids), table, len(batch.logits_rows), batch.lane)
            assert batch.kind == ("prefill", "decode")[batch.lane]
            self.shapes.add(sizes)
            out, kv = self._fn(*args)
            return StepOut(out.logits.bfloat16()), kv
        logits, rows = args
        assert isinstance(rows, SampleInputs) and logits.dtype == torch.bfloat16
        self.shapes.add((tuple(logits.shape), rows.all_greedy))
        return self._fn(logits, rows)


class Static(Backend):
    name = "static"
    device_types = ("static",)
    api_version = (1, 1)
    pins_frees = 2
    chunked: ClassVar[bool] = True

    def probe(self) -> Probe:
        return Probe(devices=("static",))

    def capabilities(self, device: str) -> Capabilities:
        return Capabilities(shapes="static")

    def ops(self, device: str) -> Ops:
        return DonatingOps()

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        prompts = Lane(
            ("prefill",), max_seqs=2, max_tokens=64, chunk_multiple=4, token_buckets=(16, 64),
            seq_buckets=(2,), block_buckets=(4, 12), row_buckets=(4, 16), exclusive=True,
            chunked=self.chunked,
        )  # fmt: skip
        decode = Lane(
            ("decode",), max_seqs=8, max_tokens=8, token_buckets=(4, 8), seq_buckets=(4, 8),
            block_buckets=(4, 12), row_buckets=(4, 8), exclusive=True,
        )  # fmt: skip
        return ExecutionPlan(16, (prompts, decode), limits.dtype, limits.kv_dtype)

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        shapes = {len(b.logits_rows) for b in program.example_batches(plan)}
        assert shapes == {4, 8, 16}
        return Compiled(program, program.kind == "forward")


@pytest.fixture(params=[True, False], ids=["in chunks", "whole"])
def static(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    module = types.ModuleType("static_plugin_for_test")
    module.octavo_backends = hookimpl(lambda: [Static()])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = Plugins([metadata.EntryPoint("static", module.__name__, "octavo")])
    monkeypatch.setattr(wiring, "plugins", lambda: found)
    monkeypatch.setattr(Static, "chunked", request.param)
    monkeypatch.setattr(DonatingOps, "fail_in_layer", None)
    monkeypatch.setattr(DonatingOps, "writes", 0)
    yield bool(request.param)


@torch.no_grad()
def rounded(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by logits of bfloat16, where two may be equal: then the lower id."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.bfloat16().float().argmax()))
    return tokens[len(prompt) :]


def requests_of(count: int) -> list[Request]:
    made = [greedy(f"r{i}", prompt_of(3 + 7 * i, seed=i), 12) for i in range(count)]
    made.append(greedy("n", prompt_of(21, seed=50), 9, n=3, temperature=1.0, seed=3))
    made.append(greedy("biased", prompt_of(9, seed=51), 6, logit_bias={5: 100.0}))
    made.append(greedy("scored", prompt_of(12, seed=52), 4, prompt_logprobs=2, logprobs=3))
    return made


def test_what_runs_only_compiled_programs_embeds_nothing(
    llama: tuple[Path, Any], static: bool
) -> None:
    made = engine(llama[0], device="static", max_num_seqs=8, num_kv_blocks=14)
    with pytest.raises(ParamError, match="compiled for generating"):
        made.add(embed("e", [5, 6], "last"))
    made.shutdown()
    with pytest.raises(ConfigError, match=r"compiled for generating.*--device cpu"):
        engine(llama[0], device="static", max_num_seqs=8, num_kv_blocks=14, task="embed")


def test_static_shapes_give_the_same_tokens(llama: tuple[Path, Any], static: bool) -> None:
    folder, model = llama
    made = engine(folder, device="static", max_num_seqs=8, num_kv_blocks=14)
    warm = made.stats().compilations
    assert warm == len(made._runner._forward.shapes) + 3 * 2  # type: ignore[attr-defined]
    assert made.info.max_num_seqs == 8 and made.info.max_model_len == 12 * 16
    assert any("prompts whole" in note for note in made.info.notes) is not static
    requests = requests_of(8)
    found = run(made, *requests)
    for r in requests[:8]:
        assert tokens_of(found[r.id]) == rounded(model, r.prompt_token_ids, 12), r.id
    assert tokens_of(found["biased"]) == [5] * 6
    assert tokens_of(found["scored"]) == rounded(model, requests[-1].prompt_token_ids, 4)
    entries = [e for u in found["scored"] for e in u.prompt_logprobs or ()]
    assert [e.token_id for e in entries] == requests[-1].prompt_token_ids[1:]
    samples = {u.index: u.token_ids for u in found["n"]}
    assert set(samples) == {0, 1, 2}
    assert made.stats().compilations == warm, "a step had a shape that was not run at the start"


def test_beams_fork_and_are_preempted_on_static_shapes(
    llama: tuple[Path, Any], static: bool
) -> None:
    """In a pool for one group at a time, beside others: each search finds what it finds alone, and scores
    as far from those of exact logits as roundings to bfloat16 take them."""
    folder, model = llama
    options: dict[str, Any] = {"device": "static", "max_num_seqs": 8, "num_kv_blocks": 14}
    asked = [
        greedy(f"b{i}", prompt_of(14 + 9 * i, seed=i), 12, use_beam_search=True, n=4 - i % 2)
        for i in range(3)
    ]
    others = [greedy(f"r{i}", prompt_of(5 + 20 * i, seed=9 + i), 24) for i in range(3)]
    alone = {}
    for request in asked:
        made = engine(folder, **options)
        alone |= run(made, request)
    made = engine(folder, **options)
    warm = made.stats().compilations
    found = run(made, others[0], *asked, *others[1:])
    stats = made.stats()
    assert stats.preemptions > 0 and stats.kv_blocks_used == 0
    assert stats.compilations == warm, "a step had a shape that was not run at the start"
    for request in asked:
        mine, theirs = found[request.id], alone[request.id]
        assert [(u.index, u.token_ids) for u in mine] == [(u.index, u.token_ids) for u in theirs]
        exact = beam_scores(model, request)
        assert [u.score for u in mine] == pytest.approx(exact, abs=0.1)
    for r in others:
        assert tokens_of(found[r.id]) == rounded(model, r.prompt_token_ids, 24), r.id


def test_a_lost_cache_costs_one_step_and_no_other_request(
    llama: tuple[Path, Any], static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device takes a layer's handle with it: the step's own requests fail, the others begin again."""
    folder, model = llama
    made = engine(folder, device="static", max_num_seqs=8)
    requests = [greedy(f"r{i}", prompt_of(20 + i, seed=i), 10) for i in range(4)]
    for r in requests:
        made.add(r)
    updates = {r.id: list(u) for r in requests for u in ([],)}
    steps = 0
    while made.has_unfinished():
        steps += 1
        if steps == 3:  # of prompts r2 and r3, while r0 and r1 decode
            monkeypatch.setattr(DonatingOps, "fail_in_layer", DonatingOps.writes + 2)
        for update in made.step():
            updates[update.request_id].append(update)
        made.scheduler.check()
    ended = {name: u[-1].finish_reason for name, u in updates.items()}
    assert ended == {"r0": "length", "r1": "length", "r2": "error", "r3": "error"}
    assert "fell over" in str(updates["r2"][-1].stop_reason)
    for r in requests[:2]:
        assert tokens_of(updates[r.id]) == rounded(model, r.prompt_token_ids, 10)
