"""Attention over the paged cache against float64, through the backend's own ops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from ragged import Ragged, expected, ragged

from octavo.backends.triton.inputs import Key, TritonInputs
from octavo.backends.triton.ops import TritonKV, TritonOps
from octavo.kernels.triton.attention import DECODE, PREFILL, Shape
from octavo.kernels.triton.kv_cache import E4M3, E4M3_BITS, E4M3_FNUZ
from octavo.plugins import KVSpec

CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def filled(ops: TritonOps, case: Ragged, kv_dtype: str, dtype: torch.dtype) -> TritonKV:
    """A cache in which only the sequences' contexts are written, and all else is NaN."""
    heads, size, size_v = case.keys[0].shape[1], case.keys[0].shape[2], case.values[0].shape[2]
    spec = KVSpec((0,), heads, size, size_v, kv_dtype)
    handle = ops.alloc_kv([spec], case.num_blocks, case.block)[0]
    for cache in (handle.cache.k, handle.cache.v):
        cache.fill_(float("nan"))
    batch, keys, values = case.history()
    meta = TritonInputs(batch, None, "cpu")
    return ops.write_kv(handle, keys.to(dtype), values.to(dtype), meta)


def check(
    case: Ragged,
    q_heads: int,
    dtype: torch.dtype,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
) -> TritonInputs:
    """Runs the case and compares; returns its inputs, which tell how it was cut."""
    ops = TritonOps("cpu")
    handle = filled(ops, case, NAMES[dtype], dtype)
    size = case.keys[0].shape[2]
    rows = len(case.batch.token_ids)
    columns = torch.randn(rows, (q_heads + 1) * size).to(dtype)
    q = columns.view(rows, q_heads + 1, size)[
        :, :q_heads
    ]  # with a row stride, as the engine has it
    sink = torch.randn(q_heads) if sinks else None
    meta = TritonInputs(case.batch, None, "cpu")
    out = ops.paged_attention(
        q, handle, meta, scale=size**-0.5, window=window, softcap=softcap, sinks=sink
    )
    assert out.shape == (rows, q_heads, case.values[0].shape[2]) and out.dtype == dtype
    tokens = case.batch.num_tokens
    wanted = expected(case, q[:tokens], dtype, size**-0.5, window, softcap, sink)
    torch.testing.assert_close(out[:tokens].double(), wanted, atol=CLOSE[dtype], rtol=1e-5)
    assert torch.equal(out[tokens:], torch.zeros_like(out[tokens:]))
    return meta


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_a_mixed_step(dtype: torch.dtype) -> None:
    """Decoding, a chunk of a prompt, a whole prompt, a prompt of one token, and a sequence without
    queries, with padding behind them."""
    case = ragged([1, 19, 40, 1, 0, 5], [37, 50, 40, 1, 9, 70], 2, 64, padding=3)
    meta = check(case, 4, dtype)
    (key,) = meta.works
    assert {work.kernel for work in meta.works[key]} == {DECODE, PREFILL}


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "size", "size_v"),
    [(9, 3, 64, 64), (4, 4, 24, 24), (6, 2, 20, 36), (40, 1, 16, 16), (7, 1, 80, 80), (2, 1, 1, 3)],
)
def test_head_sizes_and_groups(q_heads: int, kv_heads: int, size: int, size_v: int) -> None:
    case = ragged([1, 3, 21], [18, 40, 33], kv_heads, size, size_v, seed=q_heads)
    check(case, q_heads, torch.float32)


@pytest.mark.parametrize("block", [16, 32, 64, 24])
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(7, 0.0, False), (33, 5.0, True)])
def test_windows_caps_and_sinks(block: int, window: int, softcap: float, sinks: bool) -> None:
    case = ragged([1, 2, 50, 1], [90, 34, 75, 5], 1, 32, block=block, seed=window)
    check(case, 4, torch.float32, window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("sinks", [False, True])
def test_few_long_sequences_are_split_and_merged(sinks: bool) -> None:
    case = ragged([1, 5], [701, 513], 1, 32, seed=5)
    meta = check(case, 4, torch.float32, sinks=sinks, softcap=3.0 * sinks)
    works = [work for found in meta.works.values() for work in found]
    assert sum(work.parts for work in works) >= 4
    assert {int(row[0]) for work in works for row in work.merges} == {0, 1}


def test_a_window_of_a_split_sequence() -> None:
    case = ragged([1, 1], [900, 40], 1, 32, seed=6)
    meta = check(case, 2, torch.float32, window=600)
    works = [work for found in meta.works.values() for work in found]
    assert sum(work.parts for work in works) >= 2
    first = min(int(row[2]) for work in works for row in work.items if row[0] == 0)
    assert first == (900 - 600) // 32 * 32  # keys before the window are not read


def test_layers_that_look_alike_share_work_items() -> None:
    meta = TritonInputs(ragged([1, 9], [20, 9], 2, 16).batch, None, "cpu")
    shape = Shape(4, 2, 16, 16, "float32", "interpret")
    assert meta.attention(Key(shape, 0, 0)) is meta.attention(Key(shape, 0, 0))
    assert meta.attention(Key(shape, 0, 0)) is not meta.attention(Key(shape, 0, 5))


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    contexts = [int(n) for n in rng.integers(1, 120, rng.integers(1, 5))]
    queries = [1 if rng.random() < 0.5 else int(rng.integers(0, c + 1)) for c in contexts]
    queries[0] = max(queries[0], 1)
    kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 6))
    case = ragged(
        queries, contexts, kv_heads, int(rng.integers(1, 9)) * 8, block=int(rng.choice([16, 32, 64])),
        seed=seed, padding=int(rng.integers(0, 4)),
    )  # fmt: skip
    check(
        case,
        kv_heads * group,
        torch.float32 if seed % 2 else torch.float16,
        window=int(rng.choice([0, 0, 9, 40])),
        softcap=float(rng.choice([0, 4])),
        sinks=bool(rng.random() < 0.5),
    )


@pytest.mark.parametrize("codes", [E4M3, E4M3_FNUZ, E4M3_BITS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_8_bit_cache(codes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored with a scale per head, and read by the chip's own conversion or taken apart by hand. AMD's
    e4m3fnuz is written only: the interpreter cannot convert it."""
    from octavo.backends.triton import ops as module

    monkeypatch.setattr(module, "codes_of", lambda *_: codes)
    case = ragged([1, 12], [40, 30], 2, 32, seed=9)
    ops = TritonOps("cpu")
    spec = KVSpec((0,), 2, 32, 32, "fp8")
    handle = ops.alloc_kv([spec], case.num_blocks, 16)[0]
    assert ops.kv_block_bytes(spec, 16) == 16 * 2 * 64
    scales = torch.tensor([0.02, 0.05])
    handle.cache.k_scales.copy_(scales)
    handle.cache.v_scales.copy_(2 * scales)
    batch, keys, values = case.history()
    handle = ops.write_kv(handle, keys, values, TritonInputs(batch, None, "cpu"))
    kind = torch.float8_e4m3fnuz if codes == E4M3_FNUZ else torch.float8_e4m3fn
    for cache in (handle.cache.k, handle.cache.v):
        cache[0] = 0x7F
    for cache, new, scale in ((handle.cache.k, keys, scales), (handle.cache.v, values, 2 * scales)):
        stored = cache.view(torch.uint8).flatten(0, 1)[torch.from_numpy(batch.slots[0])]
        most = torch.finfo(kind).max
        wanted = (new / scale[:, None]).clamp(-most, most).to(kind)
        assert torch.equal(stored, wanted.view(torch.uint8))
    if codes == E4M3_FNUZ:
        return  # the interpreter cannot read them
    starts = np.cumsum([0, *map(len, case.keys)])
    for s, (a, b) in enumerate(pairwise(starts)):
        most = torch.finfo(kind).max
        for kept, new, scale in ((case.keys, keys, scales), (case.values, values, 2 * scales)):
            rounded = (new[a:b] / scale[:, None]).clamp(-most, most).to(kind).float()
            kept[s] = rounded * scale[:, None]
    q = torch.randn(13, 4, 32).to(dtype)
    out = ops.paged_attention(q, handle, TritonInputs(case.batch, None, "cpu"), scale=32**-0.5)
    wanted = expected(case, q, torch.float32, 32**-0.5)
    torch.testing.assert_close(out.double(), wanted, atol=2 * CLOSE[dtype] + 1e-5, rtol=1e-5)
