"""Operations of a backend over a vendor's package beside the portable ones, whichever stand-in it runs on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from wide_blocks import BLOCK, BLOCKS, MIXED, history_of, make_batch

from octavo.backends.reference.backend import ReferenceBackend
from octavo.plugins import Backend, Batch, KVSpec, Limits, SampleInputs

LIMITS = Limits(max_num_seqs=8, max_model_len=1024)
CLOSE = {"rtol": 1e-5, "atol": 3e-6}


def _filled(ops: Any, handle: Any, blocks: list[int], value: float) -> Any:
    """The cache with a number throughout some blocks."""
    size = ops.export_blocks([handle], blocks[:1]).shape[1]
    marked = torch.full((len(blocks), size // 4), value).view(torch.uint8)
    return ops.import_blocks(marked, [handle], blocks)[0]


def _attended(
    backend: Backend,
    device: str,
    batch: Batch,
    tensors: dict[str, torch.Tensor],
    spec: KVSpec,
    dtype: torch.dtype,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention makes of a batch, and the bytes of a block and of its copies."""
    ops = backend.ops(device)
    up = {k: v.to(dtype).to(ops.device) for k, v in tensors.items()}
    sinks = up.pop("sinks", None)
    handle = ops.alloc_kv([spec], BLOCKS + 8, BLOCK)[0]
    if dtype == torch.float32:  # what nobody has written may be anything
        handle = _filled(ops, handle, list(range(1, BLOCKS)), float("nan"))
    before = backend.prepare(history_of(batch), None, device)
    handle = ops.write_kv(handle, up["old_k"], up["old_v"], before)
    meta = backend.prepare(batch, None, device)
    handle = ops.write_kv(handle, up["k"], up["v"], meta)
    handles = ops.copy_blocks([handle], [(1, 20), (20, 21)])
    moved = ops.import_blocks(ops.export_blocks(handles, [20, 21]), handles, [22, 23])
    out = ops.paged_attention(up["q"], moved[0], meta, sinks=sinks, **how)
    return out[: batch.num_tokens].cpu(), ops.export_blocks(moved, [1, 20, 21, 22, 23])


@torch.inference_mode()
def attends(
    backend: Backend,
    device: str,
    dtype: str,
    kinds: tuple[tuple[int, int], ...],
    pad: int,
    heads: tuple[int, int, int],
    *,
    window: int,
    softcap: float,
    sinks: bool,
) -> None:
    """Attention over a cache of ragged sequences is that of float64, and blocks that are copied, sent away
    and brought back stay as they are. heads: of queries, of the cache, and their size."""
    q_heads, kv_heads, size = heads
    torch.manual_seed(q_heads + window)
    batch = make_batch(kinds, pad)
    rows, history = batch.num_tokens + pad, int(batch.context_lens.sum())
    drawn = torch.randn(rows, q_heads + 2 * kv_heads, size)
    tensors = {
        "q": drawn[:, :q_heads],
        "k": drawn[:, q_heads : q_heads + kv_heads],
        "v": drawn[:, q_heads + kv_heads :],
        "old_k": torch.randn(history, kv_heads, size),
        "old_v": torch.randn(history, kv_heads, size),
    }
    if sinks:
        tensors["sinks"] = torch.randn(q_heads)
    narrow = getattr(torch, dtype)
    tensors = {k: v.to(narrow) for k, v in tensors.items()}
    how = {"scale": size**-0.5, "window": window, "softcap": softcap}
    spec = KVSpec((0,), kv_heads, size, size, dtype)
    backend.start(device, replace(LIMITS, dtype=dtype, kv_dtype=dtype))
    mine, kept = _attended(backend, device, batch, tensors, spec, narrow, **how)
    wide = replace(spec, dtype="float64")
    exact, _ = _attended(
        ReferenceBackend(), "reference", batch, tensors, wide, torch.float64, **how
    )
    limits = CLOSE if dtype == "float32" else {"rtol": 3e-2, "atol": 2e-2}
    torch.testing.assert_close(mine.double(), exact, **limits)
    assert all(torch.equal(kept[0], other) for other in kept[1:])


@torch.inference_mode()
def writes_the_named_slots_alone(backend: Backend, device: str, *, clears: bool) -> None:
    """clears: blocks that begin are cleared to their ends, which nobody has written."""
    backend.start(device, LIMITS)
    ops = backend.ops(device)
    batch = make_batch(MIXED, 3)
    handle = ops.alloc_kv([KVSpec((0,), 2, 16, 16)], BLOCKS, BLOCK)[0]
    everything = list(range(BLOCKS))
    handle = _filled(ops, handle, everything, 7.0)
    k, v = torch.randn(2, batch.num_tokens + 3, 2, 16)
    up = (k.to(ops.device), v.to(ops.device))
    handle = ops.write_kv(handle, *up, backend.prepare(batch, None, device))
    found = ops.export_blocks([handle], everything)
    assert isinstance(found, torch.Tensor)
    stored = found.view(torch.float32).view(BLOCKS, 2, BLOCK, 2, 16)
    slots = torch.from_numpy(batch.slots[0][: batch.num_tokens])
    for side, new in ((0, k), (1, v)):
        flat = stored[:, side].flatten(0, 1)
        assert torch.equal(flat[slots], new[: batch.num_tokens])
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[slots] = False
        if clears:
            for block in (slots[slots % BLOCK == 0] // BLOCK).tolist():
                untouched[block * BLOCK : (block + 1) * BLOCK] = False
        assert untouched.sum() > 5 * BLOCK and (flat[untouched] == 7.0).all()


@torch.inference_mode()
def computes_the_rest_of_a_layer(backend: Backend, device: str) -> None:
    """Norms, rotary positions (twice, of two tables) and gates are those of float64."""
    torch.manual_seed(2)
    backend.start(device, LIMITS)
    ops, exact = backend.ops(device), ReferenceBackend().ops("reference")
    batch = make_batch(MIXED, 0)
    rows = batch.num_tokens

    def up(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [t.to(ops.device) for t in tensors]

    def same(got: Any, wanted: Any) -> None:
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.cpu().double(), theirs, **CLOSE)

    x, residual, weight = torch.randn(rows, 96), torch.randn(rows, 96), torch.randn(96)
    wide = (x.double(), residual.double(), weight.double())
    for offset in (0.0, 1.0):
        wanted = exact.add_rms_norm(*wide, 1e-6, offset=offset)
        same(ops.add_rms_norm(*up(x, residual, weight), 1e-6, offset=offset), wanted)
        norm = exact.rms_norm(wide[0], wide[2], 1e-6, offset=offset)
        same([ops.rms_norm(*up(x, weight), 1e-6, offset=offset)], [norm])
    q, k = torch.randn(rows, 4, 24), torch.randn(rows, 2, 24)
    theirs = ReferenceBackend().prepare(batch, None, "reference")
    mine = backend.prepare(batch, None, device)

    for interleaved in (False, True):
        gone = 0
        for _ in range(2):
            tables = [*up(*torch.randn(64, 512, 16))]
            # One that lies where the table before it lay, if that is not kept.
            table = next((t for t in tables if id(t) == gone), tables[0])
            wide = (q.double(), k.double(), table.cpu().double())
            wanted = exact.rotary(*wide, theirs, interleaved=interleaved)
            same(ops.rotary(*up(q, k), table, mine, interleaved=interleaved), wanted)
            gone = id(table)
            del table, tables
    kinds: tuple[Any, ...] = ("silu", "gelu", "gelu_tanh")
    for kind in kinds:
        same([ops.act_and_mul(*up(x), kind)], [exact.act_and_mul(x.double(), kind)])


@torch.inference_mode()
def draws_as_the_portable_op(backend: Backend, device: str, greedy: bool) -> None:
    torch.manual_seed(5)
    logits = torch.randn(12, 97) * 3
    logits[5, :], logits[6, 3] = float("-inf"), float("nan")
    backend.start(device, LIMITS)
    ops = backend.ops(device)

    def rows(where: str) -> SampleInputs:
        dice = torch.Generator().manual_seed(1)
        return SampleInputs(
            temperature=torch.tensor([0.0, 0.3, 1.0, 2.0] * 3).mul(not greedy).to(where),
            top_k=torch.tensor([0, 1, 5, 50] * 3, dtype=torch.int32).to(where),
            top_p=torch.tensor([1.0, 0.9, 0.3] * 4).to(where),
            min_p=torch.tensor([0.0, 0.05] * 6).to(where),
            seed=torch.randint(-(2**62), 2**62, (12,), generator=dice).to(where),
            counter=torch.arange(12).to(where),
            all_greedy=greedy,
        )

    mine = ops.sample(logits.to(ops.device), rows(ops.device))
    portable = ReferenceBackend().ops("reference").sample(logits, rows("cpu"))
    assert str(mine.device).startswith(ops.device) and mine.tolist() == portable.tolist()
