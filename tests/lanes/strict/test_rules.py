"""The chip does object: every rule is broken once, so that keeping them all means something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import engine, greedy, prompt_of, run

from octavo.core.engine import Engine
from octavo.core.types import SequenceUpdate
from octavo.plugins import Batch, KVSpec, Limits, ModelShape, StepOut

BLOCK = 128


def batch(
    context: int = 20, start: int = 0, blocks: tuple[int, ...] = (3, 5), **changes: Any
) -> Batch:
    """A prompt's tokens [start, context), padded to the chip's smallest buckets."""
    count = context - start
    positions, slots = np.zeros(32, np.int64), np.full(32, -1, np.int64)
    positions[:count] = np.arange(start, context)
    table = np.zeros((4, 2), np.int32)
    table[0, : len(blocks)] = blocks
    at = positions[:count]
    slots[:count] = table[0][at // BLOCK] * BLOCK + at % BLOCK
    made = Batch(
        num_tokens=count,
        num_seqs=1,
        token_ids=np.zeros(32, np.int32),
        positions=positions,
        query_start=np.array([0, count, count, count, count], np.int32),
        context_lens=np.array([context, 0, 0, 0], np.int32),
        logits_rows=np.array([count - 1, 0, 0, 0], np.int32),
        slots=(slots,),
        block_tables=(table,),
        kind="prefill",
        num_rows=1,
    )
    return replace(made, **changes)


@pytest.fixture
def backend(installed: Path) -> Any:
    from octavo_strict.backend import StrictBackend

    return StrictBackend()


class Cache:
    """One layer of a cache of `blocks` blocks, and the chip's ops over it."""

    def __init__(self, backend: Any, blocks: int = 8) -> None:
        self.backend, self.ops = backend, backend.ops("strict")
        spec = KVSpec((0,), 2, 8, 8)
        (self.handle,) = self.ops.alloc_kv([spec], blocks, BLOCK)

    def write(self, given: Batch, inputs: Any = None) -> Any:
        meta = inputs or self.backend.prepare(given, None, "strict")
        rows = torch.ones(len(given.token_ids), 2, 8)
        self.handle = self.ops.write_kv(self.handle, rows, rows, meta)
        return meta

    def read(self, meta: Any) -> torch.Tensor:
        q = torch.ones(meta.shape[0], 4, 8)
        found: torch.Tensor = self.ops.paged_attention(q, self.handle, meta, scale=1.0)
        return found


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"token_ids": np.zeros(33, np.int32)}, "ShapeError", "33 tokens.*32, 256, 1024"),
        ({"logits_rows": np.zeros(1, np.int32)}, "ShapeError", "1 rows of logits"),
        ({"kind": "mixed"}, "ShapeError", "'mixed'"),
        ({"logits_rows": np.array([20, 0, 0, 0])}, "BoundsError", "20"),
        ({"context_lens": np.array([21, 0, 0, 0])}, "StrictError", "21 tokens"),
        ({"query_start": np.array([0, 20, 20, 20, 21])}, "StrictError", "query_start"),
        ({"context_lens": np.array([20, 7, 0, 0])}, "StrictError", "padding has contexts"),
        ({"slots": (np.arange(32),)}, "StrictError", "slots .* for "),
    ],
)
def test_a_batch_that_contradicts_itself(
    backend: Any, changes: dict[str, Any], error: str, words: str
) -> None:
    backend.prepare(batch(), None, "strict")
    from octavo_strict import chip

    with pytest.raises(getattr(chip, error), match=words):
        backend.prepare(batch(**changes), None, "strict")


def test_a_prompt_goes_on_at_a_multiple(backend: Any) -> None:
    backend.prepare(batch(40, 16), None, "strict")
    with pytest.raises(RuntimeError, match="goes on at 17"):
        backend.prepare(batch(40, 17), None, "strict")


def test_indexes_are_checked_with_their_numbers(backend: Any) -> None:
    cache = Cache(backend)
    with pytest.raises(RuntimeError, match=r"a slot names blocks \[9\]; there are 0 to 7"):
        cache.write(batch(blocks=(9,)))
    cache = Cache(backend)
    with pytest.raises(RuntimeError, match="null block"):
        cache.write(batch(blocks=(0,)))
    cache = Cache(backend)
    meta = cache.write(batch(blocks=(3, 99)))
    with pytest.raises(RuntimeError, match=r"block table names blocks \[99\]"):
        cache.read(meta)
    with pytest.raises(RuntimeError, match="position 19 of 16"):
        q = torch.ones(32, 4, 8)
        cache.ops.rotary(q, q.clone(), torch.ones(16, 8), meta)
    weight = torch.ones(10, 8)
    with pytest.raises(RuntimeError, match="vocabulary of 10"):
        cache.ops.embedding(torch.full((4,), 10), weight)
    with pytest.raises(RuntimeError, match="linear of 5 rows"):
        cache.ops.linear(torch.ones(5, 8), weight)


def test_a_handle_that_was_given_away_is_gone(backend: Any) -> None:
    cache = Cache(backend)
    old = cache.handle
    meta = cache.write(batch())
    assert cache.ops.kv_lost([old]) and not cache.ops.kv_lost([cache.handle])
    cache.handle = old
    for use in (lambda: cache.read(meta), lambda: cache.write(batch())):
        with pytest.raises(RuntimeError, match="given"):
            use()


def test_what_nobody_wrote_is_nan(backend: Any) -> None:
    """In a new cache, and in a block that another had before: never an old number."""
    cache = Cache(backend)
    meta = cache.write(batch())
    assert cache.read(meta)[:20].isfinite().all() and cache.read(meta)[20:].isnan().all()
    hole = backend.prepare(batch(40, 32), None, "strict")
    cache.write(batch(40, 32), hole)
    assert cache.read(hole)[:8].isnan().all()
    cache.ops.drain()
    cache.write(batch(40, 16))
    cache.write(batch(16))  # the block begins anew: what stood behind is nobody's
    late = cache.write(batch(40, 32))
    assert cache.read(late)[:8].isnan().all()


def test_a_block_rests_until_the_chip_has_read_it(backend: Any) -> None:
    cache = Cache(backend)
    cache.read(cache.write(batch()))
    with pytest.raises(RuntimeError, match=r"writes blocks \[3\].*may be for 2 steps more"):
        cache.write(batch())
    cache = Cache(backend)
    cache.read(cache.write(batch()))
    cache.write(batch(blocks=(4,)))
    with pytest.raises(RuntimeError, match="copy_blocks writes blocks"):
        cache.ops.copy_blocks([cache.handle], [(4, 3)])
    cache = Cache(backend)
    cache.read(cache.write(batch()))
    cache.ops.drain()
    cache.write(batch())
    cache.read(cache.write(batch(32, 16)))
    for block in (4, 5):
        cache.write(batch(blocks=(block,)))
    cache.write(batch())


def test_a_copy_to_the_host_finds_who_writes_its_blocks(backend: Any) -> None:
    cache = Cache(backend)
    cache.write(batch())
    quiet = cache.ops.export_blocks([cache.handle], [3])
    assert [quiet.done() for _ in range(4)] == [False, False, False, True]
    late = cache.ops.export_blocks([cache.handle], [3])
    cache.write(batch(32, 16))
    with pytest.raises(RuntimeError, match=r"blocks \[3\] were written while"):
        late.wait()


def ended(made: Engine, count: int = 8) -> list[SequenceUpdate]:
    requests = [greedy(f"r{i}", prompt_of(122 + i % 3, seed=i), 30) for i in range(count)]
    return [updates[-1] for updates in run(made, *requests).values()]


def test_an_engine_that_hands_out_blocks_too_early_is_found(
    llama: Path, chip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo_strict.backend import StrictBackend

    monkeypatch.setattr(StrictBackend, "pins_frees", 0)
    made = engine(llama, device="strict", num_kv_blocks=6, max_model_len=200, max_num_seqs=8)
    reasons = [str(last.stop_reason) for last in ended(made) if last.finish_reason == "error"]
    assert any("RestError" in reason for reason in reasons)
    made.shutdown()


def test_an_engine_that_did_not_warm_up_is_found(
    llama: Path, chip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.core.runner import Runner

    made = engine(llama, device="strict", max_num_seqs=4)
    assert all(last.finish_reason == "length" for last in ended(made, 2))
    monkeypatch.setattr(Runner, "warm_up", lambda *_: 0)
    cold = engine(llama, device="strict", max_num_seqs=4)
    reasons = [str(last.stop_reason) for last in ended(cold, 2)]
    assert all("RecompileError" in reason for reason in reasons)


def test_nothing_but_programs_touches_the_device(backend: Any) -> None:
    from octavo_strict.program import on_device

    logits: Any = StepOut(on_device(torch.ones(4, 8).bfloat16())).logits
    assert len(logits) == 4 and logits.shape == (4, 8) and logits.cpu().float().sum() == 32
    for touch in (
        lambda: logits + 1,
        lambda: logits[0],
        lambda: logits.float(),
        lambda: logits.argmax(),
    ):
        with pytest.raises(RuntimeError, match="outside of any program"):
            touch()


def test_the_plan_follows_the_limits(backend: Any) -> None:
    shape = ModelShape("Llama", 2, 64, 4, 2, 16, 101, 8192, 1 << 20, ())
    small = backend.plan(shape, "strict", Limits(3, 200, 7))
    assert [lane.max_tokens for lane in small.lanes] == [16, 3]
    assert [lane.token_buckets for lane in small.lanes] == [(32,), (4,)]
    large = backend.plan(shape, "strict", Limits(500, 8192, 4096, 64))
    assert [lane.max_tokens for lane in large.lanes] == [1024, 64]
    assert large.lanes[0].block_buckets == (2, 8, 32, 128) and large.block_size == BLOCK
