"""Operations on XLA's CPU device, called as the engine calls them, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends.reference.backend import ReferenceBackend
from octavo.backends.xla import bridge
from octavo.backends.xla.backend import XlaBackend
from octavo.plugins import Backend, Batch, KVSpec, Limits, Ops, SampleInputs

BLOCK = 16
BLOCKS = 40


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    made = XlaBackend()
    made.start("xla:cpu", Limits(max_num_seqs=8, max_model_len=256))
    yield made
    assert not bridge.fallbacks()


def batch_of(contexts: list[int], queries: list[int], pad: int) -> Batch:
    """Sequences with their last `queries` in the step, then `pad` sequences and 3·pad tokens of padding."""
    order = np.random.default_rng(3).permutation(np.arange(1, BLOCKS)).tolist()
    seqs = len(contexts)
    table = np.zeros((seqs + pad, 9), np.int32)
    for s, context in enumerate(contexts):
        for i in range(-(-context // BLOCK)):
            table[s, i] = order.pop()
    positions = np.concatenate(
        [np.arange(c - q, c) for c, q in zip(contexts, queries, strict=True)]
    ).astype(np.int64)
    owner = np.repeat(np.arange(seqs), queries)
    slots = table[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    tokens = len(positions)
    ends = np.cumsum([0, *queries, *[0] * pad]).astype(np.int32)
    return Batch(
        num_tokens=tokens,
        num_seqs=seqs,
        token_ids=np.zeros(tokens + 3 * pad, np.int32),
        positions=np.pad(positions, (0, 3 * pad)),
        query_start=ends,
        context_lens=np.array(contexts + [0] * pad, np.int32),
        logits_rows=np.array([0], np.int32),
        slots=(np.pad(slots, (0, 3 * pad), constant_values=-1),),
        block_tables=(table,),
    )


def padded(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, len(batch.token_ids) - len(x)))


def attended(who: Backend, device: str, dtype: str, data: Any, **settings: Any) -> torch.Tensor:
    """Writes the contexts before a step, then the step's own, and attends; all unwritten memory is NaN."""
    contexts, queries, pad, q, k, v = data
    ops = who.ops(device)
    spec = KVSpec((0,), k.shape[1], k.shape[2], v.shape[2], dtype)
    handles = ops.alloc_kv([spec], BLOCKS, BLOCK)
    size = ops.kv_block_bytes(spec, BLOCK)
    nan = torch.full((BLOCKS, size), 255, dtype=torch.uint8)  # of any float dtype
    handles = ops.import_blocks(nan, handles, range(BLOCKS))
    step = batch_of(contexts, queries, pad)
    new = np.zeros(sum(contexts), bool)
    for end, count in zip(np.cumsum(contexts), queries, strict=True):
        new[end - count : end] = True
    before = [(c - n) for c, n in zip(contexts, queries, strict=True)]
    of = getattr(torch, "float64" if dtype == "float64" else dtype)
    up = ops.device
    for rows, batch in ((~new, batch_of(contexts, contexts, pad)), (new, step)):
        slots = batch.slots[0].copy()
        if batch is not step:  # the same tables, but only the rows before the step
            slots[: sum(contexts)][new] = -1
            batch = Batch(**{**fields_of(batch), "slots": (slots,)})
            rows = np.ones(sum(contexts), bool)
        meta = who.prepare(batch, None, device)
        handles = [
            ops.write_kv(
                handles[0],
                padded(k[rows], batch).to(of).to(up),
                padded(v[rows], batch).to(of).to(up),
                meta,
            )
        ]
    assert sum(before) + int(new.sum()) == sum(contexts)
    meta = who.prepare(step, None, device)
    exact = torch.float64 if dtype == "float64" else torch.float32
    if (sinks := settings.pop("sinks", None)) is not None:
        settings["sinks"] = sinks.to(up)
    out = ops.paged_attention(padded(q, step).to(exact).to(up), handles[0], meta, **settings)
    found: torch.Tensor = out.cpu()[: step.num_tokens].double()
    return found


def fields_of(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in Batch.__slots__}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(0, 0.0, False), (7, 0.0, True), (0, 5.0, False)]
)
@pytest.mark.parametrize(
    ("contexts", "queries", "pad"),
    [([37, 130, 9], [1, 90, 9], 2), ([37, 130, 1, 16], [1, 1, 1, 1], 4)],
    ids=["mixed", "decode"],
)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "size", "value"), [(9, 3, 64, 64), (4, 4, 24, 16), (8, 1, 128, 128)]
)
def test_cache_and_attention(
    backend: Backend,
    q_heads: int,
    kv_heads: int,
    size: int,
    value: int,
    contexts: list[int],
    queries: list[int],
    pad: int,
    window: int,
    softcap: float,
    sinks: bool,
    dtype: str,
) -> None:
    dice = torch.Generator().manual_seed(q_heads + window)
    as_kept = getattr(torch, dtype)
    q = torch.randn(sum(queries), q_heads, size, generator=dice)
    k = torch.randn(sum(contexts), kv_heads, size, generator=dice).to(as_kept).float()
    v = torch.randn(sum(contexts), kv_heads, value, generator=dice).to(as_kept).float()
    settings: dict[str, Any] = {"scale": size**-0.5, "window": window, "softcap": softcap}
    if sinks:
        settings["sinks"] = torch.randn(q_heads, generator=dice)
    data = (contexts, queries, pad, q, k, v)
    got = attended(backend, "xla:cpu", dtype, data, **settings)
    wanted = attended(ReferenceBackend(), "reference", "float64", data, **settings)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_move(backend: Backend, dtype: str) -> None:
    """More blocks than one call of a program moves, a chain of copies, and a round trip over the host."""
    ops = backend.ops("xla:cpu")
    specs = [KVSpec((0, 2), 2, 24, 24, dtype), KVSpec((1,), 3, 8, 16, dtype)]
    size = sum(len(s.layers) * ops.kv_block_bytes(s, BLOCK) for s in specs)
    dice = torch.Generator().manual_seed(4)
    data = torch.randint(0, 256, (BLOCKS, size), generator=dice).to(torch.uint8)
    handles = ops.import_blocks(data, ops.alloc_kv(specs, BLOCKS, BLOCK), range(BLOCKS))
    assert torch.equal(ops.export_blocks(handles, [5, 0, 39]), data[[5, 0, 39]])
    pairs = [(1, 30), (30, 31), (2, 32), (3, 33), (4, 34), (5, 35), (6, 36), (7, 37), (31, 38)]
    built = bridge.compilations()
    stale = handles
    handles = ops.copy_blocks(handles, pairs)
    for source, target in pairs:
        data[target] = data[source]
    assert torch.equal(ops.export_blocks(handles, range(BLOCKS)), data)
    assert ops.export_blocks(handles, []).shape == (0, size)
    assert bridge.compilations() == built, "moving blocks is compiled with the cache"
    with pytest.raises(RuntimeError):
        stale[0].data.cpu()


def test_seeded_draws_are_the_portable_ones(backend: Backend) -> None:
    dice = torch.Generator().manual_seed(5)
    logits = torch.randn(24, 997, generator=dice) * 3
    logits[5, :] = float("-inf")
    logits[6, 3] = float("nan")
    rows = {
        "temperature": torch.tensor([0.0, 0.3, 1.0, 2.0] * 6),
        "top_k": torch.tensor([0, 1, 5, 50, 0, 2000] * 4, dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.9, 0.3] * 8),
        "min_p": torch.tensor([0.0, 0.05] * 12),
        "seed": torch.randint(-(2**62), 2**62, (24,), generator=dice),
        "counter": torch.arange(24),
    }
    up = {name: value.to(backend.ops("xla:cpu").device) for name, value in rows.items()}
    device = up["seed"].device
    mine = backend.ops("xla:cpu").sample(logits.to(device), SampleInputs(**up))
    assert mine.cpu().tolist() == Ops().sample(logits, SampleInputs(**rows)).tolist()
