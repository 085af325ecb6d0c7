"""Every op of a backend, called as the engine calls it, against the portable one in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends.cpu.backend import KERNEL_OPS, CpuBackend
from octavo.backends.reference.backend import ReferenceBackend
from octavo.kernels import cpu as kernels
from octavo.plugins import Backend, Batch, KVSpec, Limits, Ops, SampleInputs, WeightSpec

BLOCK = 16
LIMITS = Limits(max_num_seqs=8, max_model_len=256)


@pytest.fixture
def backend() -> Iterator[Backend]:
    threads = torch.get_num_threads()
    made = CpuBackend()
    made.start("cpu", LIMITS)
    yield made
    torch.set_num_threads(threads)


def make_batch(rng: np.random.Generator, blocks: int, pad: int) -> Batch:
    """Three sequences that decode, continue a prompt and start one, then `pad` rows and sequences of
    padding, over block tables in random order."""
    contexts, queries = np.array([37, 50, 9]), np.array([1, 19, 9])
    order = rng.permutation(np.arange(1, blocks))
    table = np.zeros((3 + pad, 4), np.int32)
    at = 0
    for s, context in enumerate(contexts):
        need = -(-int(context) // BLOCK)
        table[s, :need] = order[at : at + need]
        at += need
    positions = np.concatenate(
        [np.arange(c - q, c) for c, q in zip(contexts, queries, strict=True)]
    )
    owner = np.repeat(np.arange(3), queries)
    slots = table[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    tokens = len(positions)
    start = np.full(4 + pad, tokens, np.int32)
    start[:4] = np.concatenate([[0], np.cumsum(queries)])
    lens = np.zeros(3 + pad, np.int32)
    lens[:3] = contexts
    return Batch(
        num_tokens=tokens,
        num_seqs=3,
        token_ids=np.zeros(tokens + pad, np.int32),
        positions=np.pad(positions, (0, pad)),
        query_start=start,
        context_lens=lens,
        logits_rows=np.array([0], np.int32),
        slots=(np.pad(slots, (0, pad), constant_values=-1),),
        block_tables=(table,),
    )


def filled(
    ops: Ops, backend: Backend, device: str, spec: KVSpec, batch: Batch, k: Any, v: Any
) -> Any:
    """A cache with every context written: the rows before this step first, then the step's own."""
    handle = ops.alloc_kv([spec], 32, BLOCK)[0]
    contexts = batch.context_lens[: batch.num_seqs]
    owner = np.repeat(np.arange(batch.num_seqs), contexts)
    positions = np.concatenate([np.arange(c) for c in contexts])
    slots = batch.block_tables[0][owner, positions // BLOCK].astype(np.int64) * BLOCK
    history = replace(
        batch,
        num_tokens=len(positions),
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slots=(slots + positions % BLOCK,),
    )
    return ops.write_kv(handle, k, v, backend.prepare(history, None, device))


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(0, 0.0, False), (7, 0.0, False), (0, 5.0, True)]
)
@pytest.mark.parametrize(("q_heads", "kv_heads", "size"), [(9, 3, 64), (4, 4, 24), (8, 1, 128)])
def test_cache_and_attention(
    backend: Backend,
    q_heads: int,
    kv_heads: int,
    size: int,
    window: int,
    softcap: float,
    sinks: bool,
    pad: int,
) -> None:
    rng = np.random.default_rng(q_heads * 100 + window + pad)
    torch.manual_seed(1)
    batch = make_batch(rng, 12, pad)
    history = int(batch.context_lens.sum())
    qkv = torch.randn(batch.num_tokens + pad, (q_heads + 2 * kv_heads) * size)
    heads = qkv.view(len(qkv), -1, size)
    q, k, v = (
        heads[:, :q_heads],
        heads[:, q_heads : q_heads + kv_heads],
        heads[:, q_heads + kv_heads :],
    )
    old_k, old_v = torch.randn(2, history, kv_heads, size)
    sink = torch.randn(q_heads) if sinks else None
    results = []
    for who, device in ((backend, "cpu"), (ReferenceBackend(), "reference")):
        exact = device == "reference"
        spec = KVSpec((0,), kv_heads, size, size, "float64" if exact else "float32")
        ops = who.ops(device)
        wide = torch.float64 if exact else torch.float32
        handle = filled(ops, who, device, spec, batch, old_k.to(wide), old_v.to(wide))
        meta = who.prepare(batch, None, device)
        handle = ops.write_kv(handle, k.to(wide) if exact else k, v.to(wide) if exact else v, meta)
        handles = ops.copy_blocks([handle], [(1, 20), (2, 21)])
        moved = ops.import_blocks(ops.export_blocks(handles, [20, 21]), handles, [22, 23])
        out = ops.paged_attention(
            q.to(wide) if exact else q, moved[0], meta, scale=size**-0.5, window=window, softcap=softcap,
            sinks=sink,
        )  # fmt: skip
        results.append((out[: batch.num_tokens], ops.export_blocks(moved, [1, 2, 20, 21, 22, 23])))
    torch.testing.assert_close(results[0][0].double(), results[1][0], rtol=1e-5, atol=2e-6)
    original, copied, restored = results[0][1].view(3, 2, -1)
    assert torch.equal(original, copied) and torch.equal(original, restored)


def test_the_rest_of_a_layer(backend: Backend) -> None:
    torch.manual_seed(2)
    ops, exact = backend.ops("cpu"), ReferenceBackend().ops("reference")
    batch = make_batch(np.random.default_rng(3), 12, 0)
    rows = batch.num_tokens
    meta = backend.prepare(batch, None, "cpu")
    x, residual, weight = torch.randn(rows, 96), torch.randn(rows, 96), torch.randn(96)
    close = {"rtol": 1e-5, "atol": 2e-6}
    for offset in (0.0, 1.0):
        wanted = exact.add_rms_norm(
            x.double(), residual.double(), weight.double(), 1e-6, offset=offset
        )
        normed = exact.rms_norm(x.double(), weight.double(), 1e-6, offset=offset)
        torch.testing.assert_close(
            ops.rms_norm(x, weight, 1e-6, offset=offset).double(), normed, **close
        )
        got = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6, offset=offset)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.double(), theirs, **close)
    table = torch.randn(64, 16)
    q, k = torch.randn(rows, 4, 24), torch.randn(rows, 2, 24)
    for interleaved in (False, True):
        wanted = exact.rotary(q.double(), k.double(), table.double(), meta, interleaved=interleaved)
        got = ops.rotary(q.clone(), k.clone(), table, meta, interleaved=interleaved)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.double(), theirs, **close)
    for kind in ("silu", "gelu", "gelu_tanh"):
        wanted_act = exact.act_and_mul(x.double(), kind)  # type: ignore[arg-type]
        torch.testing.assert_close(ops.act_and_mul(x, kind).double(), wanted_act, **close)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_with_stacked_parts(backend: Backend, rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    parts = {"q": torch.randn(40, 96), "k": torch.randn(24, 96)}
    spec = WeightSpec("qk", "linear", (("q", (40, 96)), ("k", (24, 96))), shard_axis=0)
    ops = backend.ops("cpu")
    b = torch.randn(64) if bias else None
    x = torch.randn(rows, 200)[:, :96]  # a view with a row stride
    wanted = torch.nn.functional.linear(
        x.double(), torch.cat(list(parts.values())).double(), None if b is None else b.double()
    )
    got = ops.linear(x, ops.pack_weight(parts, spec, "float32"), bias=b)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=2e-5)


def test_a_tied_head_and_its_embedding(backend: Backend) -> None:
    torch.manual_seed(4)
    table = torch.randn(50, 32)
    ops = backend.ops("cpu")
    embedding = ops.pack_weight(
        {"e": table}, WeightSpec("e", "embedding", (("e", (50, 32)),)), "float32"
    )
    head = ops.tied_weight(embedding, WeightSpec("h", "linear", (("e", (50, 32)),), alias="e"))
    ids = torch.tensor([3, 0, 49, 3])
    assert torch.equal(ops.embedding(ids, embedding), table[ids])
    x = torch.randn(4, 32)
    torch.testing.assert_close(ops.linear(x, head), x @ table.T, rtol=1e-5, atol=1e-5)


def test_seeded_draws_are_the_portable_ones(backend: Backend) -> None:
    torch.manual_seed(5)
    logits = torch.randn(24, 997) * 3
    logits[5, :] = float("-inf")
    logits[6, 3] = float("nan")
    rows = SampleInputs(
        temperature=torch.tensor([0.0, 0.3, 1.0, 2.0] * 6),
        top_k=torch.tensor([0, 1, 5, 50, 0, 2000] * 4, dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.9, 0.3] * 8),
        min_p=torch.tensor([0.0, 0.05] * 12),
        seed=torch.randint(-(2**62), 2**62, (24,)),
        counter=torch.arange(24),
    )
    mine, portable = backend.ops("cpu").sample(logits, rows), Ops().sample(logits, rows)
    assert mine.tolist() == portable.tolist()
    assert mine[5] == -1 and mine[6] == -1 and (mine[7:] >= 0).all()


def test_token_logprobs(backend: Backend) -> None:
    torch.manual_seed(6)
    logits = torch.randn(12, 997) * 4
    logits[3, ::2] = float("-inf")
    ids = torch.randint(0, 997, (12,))
    ids[3] = 1
    mine = backend.ops("cpu").token_logprobs(logits, ids)
    wanted = Ops().token_logprobs(logits.double(), ids)
    assert mine[1].tolist() == wanted[1].tolist()
    for got, exact in ((mine[0], wanted[0]), (mine[2], wanted[2])):
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-5)


def test_the_kernels_are_the_compiled_ones(backend: Backend) -> None:
    """A failed compile installs too: it must not pass for the kernels here."""
    assert kernels.available(), kernels.why_unavailable()
    capabilities = backend.capabilities("cpu")
    assert all(capabilities.ops[op] == f"c++ {kernels.isa()}" for op in KERNEL_OPS)
    overridden = type(backend.ops("cpu"))
    assert all(getattr(overridden, op) is not getattr(Ops, op) for op in KERNEL_OPS)
    if torch.get_num_threads() > 1:
        assert kernels.threads() == torch.get_num_threads()
        assert kernels.threading() == f"{torch.get_num_threads()} threads"
