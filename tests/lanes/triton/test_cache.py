"""Writing to the cache, and moving whole blocks, in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ragged import ragged

from octavo.backends.triton.inputs import TritonInputs
from octavo.backends.triton.ops import TritonOps
from octavo.core import ops as portable
from octavo.kernels.triton.copy import Caches, rounds
from octavo.kernels.triton.kv_cache import Cache, write
from octavo.plugins import KVSpec

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "size", "size_v", "block"), [(2, 24, 40, 16), (3, 64, 64, 32)])
def test_only_the_named_slots_are_written(
    dtype: torch.dtype, heads: int, size: int, size_v: int, block: int
) -> None:
    rng = np.random.default_rng(size)
    tokens = 37
    shape = (7, block, heads)
    k_cache, v_cache = (torch.full((*shape, n), 123.0, dtype=dtype) for n in (size, size_v))
    ones = torch.ones(heads)
    qkv = torch.randn(tokens, heads * (size + size_v) + 5).to(dtype)
    k = qkv[:, : heads * size].view(tokens, heads, size)
    v = qkv[:, heads * size : heads * (size + size_v)].view(tokens, heads, size_v)
    slots = torch.from_numpy(rng.permutation(7 * block)[:tokens].astype(np.int64))
    slots[[0, 5, 20, 36]] = -1
    write(Cache(k_cache, v_cache, ones, ones), k, v, slots, "interpret")
    live = slots >= 0
    for cache, new in ((k_cache, k), (v_cache, v)):
        wanted = torch.full_like(cache, 123.0)
        wanted.flatten(0, 1)[slots[live]] = new[live]
        assert torch.equal(cache, wanted)


def test_an_empty_step_writes_nothing() -> None:
    cache = torch.full((2, 16, 1, 16), 5.0)
    ones = torch.ones(1)
    new = torch.zeros(0, 1, 16)
    write(
        Cache(cache, cache.clone(), ones, ones),
        new,
        new,
        torch.zeros(0, dtype=torch.int64),
        "interpret",
    )
    assert bool((cache == 5).all())


def test_numbers_that_an_8_bit_cache_cannot_hold() -> None:
    """Too large ones become the largest, NaN becomes 0: nothing that is read may be NaN."""
    ops = TritonOps("cpu")
    handle = ops.alloc_kv([KVSpec((0,), 1, 16, 16, "fp8")], 2, 16)[0]
    new = torch.tensor([1e9, -1e9, float("nan"), 449.0, 0.5, 2.0**-10, -0.0, 0.0] * 2).view(
        1, 1, 16
    )
    write(handle.cache, new, new, torch.tensor([3]), "interpret")
    stored = handle.cache.k[0, 3, 0].view(torch.float8_e4m3fn).float()
    # Half of the smallest number goes to the even one, 0.
    assert stored[:8].tolist() == [448, -448, 0, 448, 0.5, 0, 0, 0]


def handles_of(ops: TritonOps) -> list[Any]:
    """Two groups of layers whose blocks differ in size, filled with random bytes."""
    groups = [
        KVSpec((0, 2), 2, 24, 40, "float16"),
        KVSpec((1,), 1, 72, 72, "float32", "window", 32),
        KVSpec((3,), 4, 16, 16, "fp8"),
    ]
    handles = ops.alloc_kv(groups, 12, 16)
    torch.manual_seed(1)
    for handle in handles:
        for cache in (handle.cache.k, handle.cache.v):
            raw = cache.view(torch.uint8)
            raw.copy_(torch.randint(0, 120, raw.shape, dtype=torch.uint8))
    return handles


def pairs_of(handles: list[Any]) -> list[portable.KVPair]:
    return [(h.cache.k.clone(), h.cache.v.clone()) for h in handles]


@pytest.mark.parametrize(
    "pairs", [[(1, 2)], [(1, 2), (3, 4), (1, 5)], [(1, 2), (2, 3), (3, 1), (4, 2)], []]
)
def test_blocks_are_copied_in_order(pairs: list[tuple[int, int]]) -> None:
    ops = TritonOps("cpu")
    handles = handles_of(ops)
    wanted = portable.copy_blocks(pairs_of(handles), pairs)
    for handle, (k, v) in zip(ops.copy_blocks(handles, pairs), wanted, strict=True):
        assert torch.equal(handle.cache.k, k) and torch.equal(handle.cache.v, v)


def test_copies_that_depend_on_each_other_are_launched_apart() -> None:
    assert rounds([(1, 2), (3, 4), (1, 5)]) == [[(1, 2), (3, 4), (1, 5)]]
    assert rounds([(1, 2), (2, 3)]) == [[(1, 2)], [(2, 3)]]
    assert rounds([(1, 2), (3, 1)]) == [[(1, 2)], [(3, 1)]]
    assert rounds([(1, 2), (3, 2)]) == [[(1, 2)], [(3, 2)]]


def test_blocks_go_to_the_host_and_come_back() -> None:
    ops = TritonOps("cpu")
    handles = handles_of(ops)
    before = pairs_of(handles)
    exported = ops.export_blocks(handles, [5, 1, 7])
    assert isinstance(exported, torch.Tensor) and exported.dtype == torch.uint8
    assert torch.equal(exported, portable.export_blocks(before, [5, 1, 7]))
    after = ops.import_blocks(exported, handles, [2, 9, 4])
    wanted = portable.import_blocks(exported, before, [2, 9, 4])
    for handle, (k, v) in zip(after, wanted, strict=True):
        assert torch.equal(handle.cache.k, k) and torch.equal(handle.cache.v, v)


def test_one_layer_alone() -> None:
    ops = TritonOps("cpu")
    handles = handles_of(ops)
    others = pairs_of(handles[:1])
    ops.copy_blocks([handles[1]], [(3, 6)])
    assert torch.equal(handles[1].cache.k[3], handles[1].cache.k[6])
    assert torch.equal(handles[0].cache.k, others[0][0])


def test_blocks_of_half_words_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        Caches.of([torch.zeros(4, 3, 1, 1, dtype=torch.float16)])


def test_a_batch_with_tokens_of_the_step_before() -> None:
    """`token_src` names rows of the last step's tokens, which are still on the device."""
    from dataclasses import replace

    from octavo.plugins import StepOut

    batch = ragged([1, 1, 1], [3, 4, 5], 1, 16).batch
    batch = replace(batch, token_src=np.array([2, -1, 0], np.int32))
    prev = StepOut(logits=None, tokens=torch.tensor([11, 12, 13]))
    assert TritonInputs(batch, prev, "cpu").token_ids.tolist() == [13, 0, 11]
