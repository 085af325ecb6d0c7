"""Every operation on the stand-in device against the portable one in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from wide_blocks import BLOCK, BLOCKS, CONTINUED, DECODES, MIXED, STARTS, history_of, make_batch

from octavo.backends.gaudi.backend import GaudiBackend
from octavo.backends.reference.backend import ReferenceBackend
from octavo.plugins import Backend, Batch, KVSpec, Limits, SampleInputs, WeightSpec

LIMITS = Limits(max_num_seqs=8, max_model_len=1024)


def poisoned(backend: Backend, ops: Any, handle: Any, blocks: list[int]) -> Any:
    """The cache with NaN in blocks that no sequence has begun."""
    size = ops.export_blocks([handle], blocks[:1]).shape[1]
    bad = torch.full((len(blocks), size // 4), float("nan")).view(torch.uint8)
    return ops.import_blocks(bad, [handle], blocks)[0]


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
    up = {k: v.to(dtype).to(ops.device) for k, v in tensors.items()}
    sinks = up.pop("sinks", None)
    handle = ops.alloc_kv([spec], BLOCKS + 8, BLOCK)[0]
    if dtype == torch.float32:
        handle = poisoned(backend, ops, handle, list(range(1, BLOCKS)))
    before = backend.prepare(history_of(batch), None, device)
    handle = ops.write_kv(handle, up["old_k"], up["old_v"], before)
    meta = backend.prepare(batch, None, device)
    handle = ops.write_kv(handle, up["k"], up["v"], meta)
    handles = ops.copy_blocks([handle], [(1, 20), (20, 21)])
    moved = ops.import_blocks(ops.export_blocks(handles, [20, 21]), handles, [22, 23])
    out = ops.paged_attention(up["q"], moved[0], meta, sinks=sinks, **how)
    return out[: batch.num_tokens].cpu(), ops.export_blocks(moved, [1, 20, 21, 22, 23])


@pytest.mark.parametrize("chip", ["Gaudi3", "Gaudi2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kinds", "pad"), [(MIXED, 0), (MIXED, 3), (DECODES, 0), (DECODES, 4), (STARTS, 2), (CONTINUED, 0)]
)  # fmt: skip
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(0, 0.0, False), (7, 0.0, False), (150, 0.0, False), (0, 5.0, True)],
)
@pytest.mark.parametrize(("q_heads", "kv_heads", "size"), [(6, 2, 32), (4, 4, 24)])
def test_cache_and_attention(
    standin: Any,
    chip: str,
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
    standin.generation[0] = chip
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
    backend = GaudiBackend()
    backend.start("hpu", LIMITS)
    spec = KVSpec((0,), kv_heads, size, size, dtype)
    with torch.inference_mode():
        mine, bytes_of = run(backend, "hpu", batch, tensors, spec, narrow, **how)
        exact, _ = run(
            ReferenceBackend(),
            "reference",
            batch,
            tensors,
            replace(spec, dtype="float64"),
            torch.float64,
            **how,
        )
    limits = {"rtol": 1e-5, "atol": 3e-6} if dtype == "float32" else {"rtol": 3e-2, "atol": 2e-2}
    torch.testing.assert_close(mine.double(), exact, **limits)
    first = bytes_of[0]
    assert all(torch.equal(first, other) for other in bytes_of[1:])
    decodes, fused = any(q == 1 for _, q in kinds), chip == "Gaudi3" and not sinks
    assert (standin.calls["block_softmax"] > 0) == (decodes and fused)
    assert (standin.calls["block_softmax_adjustment"] > 0) == (decodes and fused)
    assert (standin.calls["sdpa_recomp_fwd"] > 0) == (any(q > 1 for _, q in kinds) and not sinks)


def test_nothing_but_the_named_slots_is_written(standin: Any) -> None:
    backend = GaudiBackend()
    backend.start("hpu", LIMITS)
    ops = backend.ops("hpu")
    batch = make_batch(MIXED, 3)
    handle = ops.alloc_kv([KVSpec((0,), 2, 16, 16)], BLOCKS, BLOCK)[0]
    everything = list(range(BLOCKS))
    with torch.inference_mode():
        size = ops.export_blocks([handle], [0]).shape[1]
        marked = torch.full((BLOCKS, size // 4), 7.0)
        handle = ops.import_blocks(marked.view(torch.uint8), [handle], everything)[0]
        k, v = torch.randn(2, batch.num_tokens + 3, 2, 16)
        handle = ops.write_kv(handle, k.to("hpu"), v.to("hpu"), backend.prepare(batch, None, "hpu"))
        found = ops.export_blocks([handle], everything).view(torch.float32)
    stored = found.view(BLOCKS, 2, BLOCK, 2, 16)
    slots = torch.from_numpy(batch.slots[0][: batch.num_tokens])
    for side, new in ((0, k), (1, v)):
        flat = stored[:, side].flatten(0, 1)
        assert torch.equal(flat[slots], new[: batch.num_tokens])
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[slots] = False
        begun = (
            slots[slots % BLOCK == 0] // BLOCK
        )  # cleared to their ends, which nobody has written
        for block in begun.tolist():
            untouched[block * BLOCK : (block + 1) * BLOCK] = False
        assert untouched.sum() > 5 * BLOCK and (flat[untouched] == 7.0).all()


def test_the_rest_of_a_layer(standin: Any) -> None:
    torch.manual_seed(2)
    backend = GaudiBackend()
    backend.start("hpu", LIMITS)
    ops, exact = backend.ops("hpu"), ReferenceBackend().ops("reference")
    batch = make_batch(MIXED, 0)
    rows = batch.num_tokens
    x, residual, weight = torch.randn(rows, 96), torch.randn(rows, 96), torch.randn(96)
    close = {"rtol": 1e-5, "atol": 3e-6}
    with torch.inference_mode():
        for offset in (0.0, 1.0):
            wanted = exact.add_rms_norm(
                x.double(), residual.double(), weight.double(), 1e-6, offset=offset
            )
            got = ops.add_rms_norm(
                x.to("hpu"), residual.to("hpu"), weight.to("hpu"), 1e-6, offset=offset
            )
            for mine, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine.cpu().double(), theirs, **close)
        table = torch.randn(512, 16)
        q, k = torch.randn(rows, 4, 24), torch.randn(rows, 2, 24)
        for interleaved in (False, True):
            wanted = exact.rotary(
                q.double(),
                k.double(),
                table.double(),
                ReferenceBackend().prepare(batch, None, "reference"),
                interleaved=interleaved,
            )
            got = ops.rotary(
                q.to("hpu"),
                k.to("hpu"),
                table.to("hpu"),
                backend.prepare(batch, None, "hpu"),
                interleaved=interleaved,
            )
            for mine, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine.cpu().double(), theirs, **close)
        for kind in ("silu", "gelu", "gelu_tanh"):
            torch.testing.assert_close(
                ops.act_and_mul(x.to("hpu"), kind).cpu().double(),  # type: ignore[arg-type]
                exact.act_and_mul(x.double(), kind),  # type: ignore[arg-type]
                **close,
            )
    assert standin.calls["rms_norm"] == 2 and standin.calls["rotary_pos_embedding"] == 4


@pytest.mark.parametrize("greedy", [False, True])
def test_draws_are_the_portable_ones(standin: Any, greedy: bool) -> None:
    torch.manual_seed(5)
    logits = torch.randn(12, 97) * 3
    logits[5, :], logits[6, 3] = float("-inf"), float("nan")
    backend = GaudiBackend()
    backend.start("hpu", LIMITS)

    def rows(device: str) -> SampleInputs:
        dice = torch.Generator().manual_seed(1)
        return SampleInputs(
            temperature=torch.tensor([0.0, 0.3, 1.0, 2.0] * 3).mul(not greedy).to(device),
            top_k=torch.tensor([0, 1, 5, 50] * 3, dtype=torch.int32).to(device),
            top_p=torch.tensor([1.0, 0.9, 0.3] * 4).to(device),
            min_p=torch.tensor([0.0, 0.05] * 6).to(device),
            seed=torch.randint(-(2**62), 2**62, (12,), generator=dice).to(device),
            counter=torch.arange(12).to(device),
            all_greedy=greedy,
        )

    with torch.inference_mode():
        mine = backend.ops("hpu").sample(logits.to("hpu"), rows("hpu"))
        portable = ReferenceBackend().ops("reference").sample(logits, rows("cpu"))
    assert mine.device.type == "hpu" and mine.tolist() == portable.tolist()


@pytest.mark.parametrize("bias", [False, True])
def test_fp8_products(standin: Any, bias: bool) -> None:
    """No worse than rounding weights and activations to three bits of fraction."""
    torch.manual_seed(6)
    backend = GaudiBackend()
    backend.start("hpu", LIMITS)
    ops = backend.ops("hpu")
    parts = {"q": torch.randn(40, 96), "k": torch.randn(24, 96) * 30}
    spec = WeightSpec("qk", "linear", (("q", (40, 96)), ("k", (24, 96))), scheme="fp8")
    x, b = torch.randn(7, 96).bfloat16(), torch.randn(64).bfloat16() if bias else None
    with torch.inference_mode():
        packed = ops.pack_weight(parts, spec, "bfloat16")
        got = ops.linear(x.to("hpu"), packed, bias=None if b is None else b.to("hpu")).cpu()
    stacked = torch.cat(list(parts.values())).double()
    wanted = torch.nn.functional.linear(x.double(), stacked, None if b is None else b.double())
    noise = x.double().norm(dim=1, keepdim=True) * stacked.norm(dim=1) * 2**-4
    assert ((got.double() - wanted).abs() < noise).all()
    assert standin.calls["fp8_gemm_v2"] == 1
