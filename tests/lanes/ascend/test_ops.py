"""Every operation, through torch-npu's schemas, against the portable one in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import StandInAscend
from wide_blocks import BLOCK, BLOCKS, CONTINUED, DECODES, MIXED, STARTS, history_of, make_batch

from octavo.backends.reference.backend import ReferenceBackend
from octavo.plugins import Backend, Batch, KVSpec, Limits, SampleInputs

LIMITS = Limits(max_num_seqs=8, max_model_len=1024)


def run(
    backend: Backend,
    device: str,
    batch: Batch,
    tensors: dict[str, torch.Tensor],
    spec: KVSpec,
    dtype: torch.dtype,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    ops = backend.ops(device)
    up = {k: v.to(dtype) for k, v in tensors.items()}
    sinks = up.pop("sinks", None)
    handle = ops.alloc_kv([spec], BLOCKS + 8, BLOCK)[0]
    if dtype == torch.float32:  # what nobody has written may be anything
        size = ops.export_blocks([handle], [0]).shape[1]
        bad = torch.full((BLOCKS - 1, size // 4), float("nan")).view(torch.uint8)
        handle = ops.import_blocks(bad, [handle], list(range(1, BLOCKS)))[0]
    before = backend.prepare(history_of(batch), None, device)
    handle = ops.write_kv(handle, up["old_k"], up["old_v"], before)
    meta = backend.prepare(batch, None, device)
    handle = ops.write_kv(handle, up["k"], up["v"], meta)
    handles = ops.copy_blocks([handle], [(1, 20), (20, 21)])
    moved = ops.import_blocks(ops.export_blocks(handles, [20, 21]), handles, [22, 23])
    out = ops.paged_attention(up["q"], moved[0], meta, sinks=sinks, **how)
    return out[: batch.num_tokens], ops.export_blocks(moved, [1, 20, 21, 22, 23])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kinds", "pad"), [(MIXED, 0), (MIXED, 3), (DECODES, 0), (DECODES, 4), (STARTS, 2), (CONTINUED, 0)]
)  # fmt: skip
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(0, 0.0, False), (7, 0.0, False), (150, 0.0, True), (0, 0.0, True), (0, 5.0, True)],
)
@pytest.mark.parametrize(("q_heads", "kv_heads", "size"), [(6, 2, 32), (4, 4, 16)])
def test_cache_and_attention(
    npu: Any,
    dtype: str,
    kinds: tuple[tuple[int, int], ...],
    pad: int,
    window: int,
    softcap: float,
    sinks: bool,
    q_heads: int,
    kv_heads: int,
    size: int,
) -> None:
    torch.manual_seed(q_heads + window)
    batch = make_batch(kinds, pad)
    rows, history = batch.num_tokens + pad, int(batch.context_lens.sum())
    heads = torch.randn(rows, q_heads + 2 * kv_heads, size)
    tensors = {
        "q": heads[:, :q_heads],
        "k": heads[:, q_heads : q_heads + kv_heads],
        "v": heads[:, q_heads + kv_heads :],
        "old_k": torch.randn(history, kv_heads, size),
        "old_v": torch.randn(history, kv_heads, size),
    }
    if sinks:
        tensors["sinks"] = torch.randn(q_heads)
    narrow = getattr(torch, dtype)
    tensors = {k: v.to(narrow) for k, v in tensors.items()}
    how = {"scale": size**-0.5, "window": window, "softcap": softcap}
    spec = KVSpec((0,), kv_heads, size, size, dtype)
    exactly = (ReferenceBackend(), "reference", batch, tensors, replace(spec, dtype="float64"))
    backend = StandInAscend()
    backend.start("npu", replace(LIMITS, dtype=dtype, kv_dtype=dtype))
    with torch.inference_mode():
        mine, kept = run(backend, "npu", batch, tensors, spec, narrow, **how)
        exact, _ = run(*exactly, torch.float64, **how)
    limits = {"rtol": 1e-5, "atol": 3e-6} if dtype == "float32" else {"rtol": 3e-2, "atol": 2e-2}
    torch.testing.assert_close(mine.double(), exact, **limits)
    assert all(torch.equal(kept[0], other) for other in kept[1:])
    assert npu["_npu_reshape_and_cache"] == 2
    decode = all(q == 1 for _, q in kinds)
    plain = decode and not window and not sinks
    assert npu["_npu_paged_attention"] == plain
    assert npu["npu_fused_infer_attention_score"] == (not plain and not sinks)
    assert npu["npu_fused_infer_attention_score_v2"] == (sinks and not softcap)


def test_nothing_but_the_named_slots_is_written(npu: Any) -> None:
    backend = StandInAscend()
    ops = backend.ops("npu")
    batch = make_batch(MIXED, 3)
    handle = ops.alloc_kv([KVSpec((0,), 2, 16, 16)], BLOCKS, BLOCK)[0]
    everything = list(range(BLOCKS))
    size = ops.export_blocks([handle], [0]).shape[1]
    marked = torch.full((BLOCKS, size // 4), 7.0)
    handle = ops.import_blocks(marked.view(torch.uint8), [handle], everything)[0]
    k, v = torch.randn(2, batch.num_tokens + 3, 2, 16)
    handle = ops.write_kv(handle, k, v, backend.prepare(batch, None, "npu"))
    stored = ops.export_blocks([handle], everything).view(torch.float32)
    slots = torch.from_numpy(batch.slots[0][: batch.num_tokens])
    for side, new in ((0, k), (1, v)):
        flat = stored.view(BLOCKS, 2, BLOCK, 2, 16)[:, side].flatten(0, 1)
        assert torch.equal(flat[slots], new[: batch.num_tokens])
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[slots] = False
        assert (flat[untouched] == 7.0).all()


def test_the_rest_of_a_layer(npu: Any) -> None:
    torch.manual_seed(2)
    backend = StandInAscend()
    ops, exact = backend.ops("npu"), ReferenceBackend().ops("reference")
    batch = make_batch(MIXED, 0)
    rows = batch.num_tokens
    x, residual, weight = torch.randn(rows, 96), torch.randn(rows, 96), torch.randn(96)
    close = {"rtol": 1e-5, "atol": 3e-6}
    for offset in (0.0, 1.0):
        wide = (x.double(), residual.double(), weight.double(), 1e-6)
        wanted = exact.add_rms_norm(*wide, offset=offset)
        for mine, theirs in zip(
            ops.add_rms_norm(x, residual, weight, 1e-6, offset=offset), wanted, strict=True
        ):
            torch.testing.assert_close(mine.double(), theirs, **close)
        torch.testing.assert_close(
            ops.rms_norm(x, weight, 1e-6, offset=offset).double(),
            exact.rms_norm(x.double(), weight.double(), 1e-6, offset=offset),
            **close,
        )
    table, q, k = torch.randn(512, 16), torch.randn(rows, 4, 24), torch.randn(rows, 2, 24)
    theirs = ReferenceBackend().prepare(batch, None, "reference")
    mine = backend.prepare(batch, None, "npu")
    for interleaved in (False, True):
        wanted = exact.rotary(
            q.double(), k.double(), table.double(), theirs, interleaved=interleaved
        )
        got = ops.rotary(q, k, table, mine, interleaved=interleaved)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, **close)
    for kind in ("silu", "gelu", "gelu_tanh"):
        got = ops.act_and_mul(x, kind).double()  # type: ignore[arg-type]
        torch.testing.assert_close(got, exact.act_and_mul(x.double(), kind), **close)  # type: ignore[arg-type]
    assert npu["npu_rotary_mul"] == 4 and npu["npu_swiglu"] == 1


@pytest.mark.parametrize("greedy", [False, True])
def test_draws_are_the_portable_ones(npu: Any, greedy: bool) -> None:
    torch.manual_seed(5)
    logits = torch.randn(12, 97) * 3
    logits[5, :], logits[6, 3] = float("-inf"), float("nan")
    rows = SampleInputs(
        temperature=torch.tensor([0.0, 0.3, 1.0, 2.0] * 3).mul(not greedy),
        top_k=torch.tensor([0, 1, 5, 50] * 3, dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.9, 0.3] * 4),
        min_p=torch.tensor([0.0, 0.05] * 6),
        seed=torch.randint(-(2**62), 2**62, (12,)),
        counter=torch.arange(12),
        all_greedy=greedy,
    )
    mine = StandInAscend().ops("npu").sample(logits, rows)
    assert mine.tolist() == ReferenceBackend().ops("reference").sample(logits, rows).tolist()
