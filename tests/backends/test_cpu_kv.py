"""Where the C++ kernels' KV cache lies, and that its memory is there in time."""

from __future__ import annotations

import platform
import resource
import sys
import threading
from dataclasses import replace

import pytest
import torch

from octavo.backends.cpu import kv
from octavo.backends.cpu.ops import CpuOps
from octavo.core import huge_pages
from octavo.plugins import KVSpec

SPEC = KVSpec(kv_heads=2, head_size=16, head_size_v=16, dtype="float32", layers=(0, 1, 2))
BLOCKS = 9


def caches(*specs: KVSpec) -> list[kv.CpuKV]:
    handles = CpuOps().alloc_kv(specs, BLOCKS, 16)
    for handle in handles:
        for cache in (handle.k, handle.v):
            cache.copy_(torch.randint(-99, 99, cache.shape).to(cache.dtype))
    return handles


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_block_of_all_layers_lies_together_and_no_two_caches_overlap(dtype: str) -> None:
    handles = caches(replace(SPEC, dtype=dtype))
    stride = handles[0].region.data.stride(0)
    for block in range(BLOCKS):
        used = torch.zeros(stride, dtype=torch.int)
        for handle in handles:
            for cache in (handle.k, handle.v):
                at = cache[block].data_ptr() - handle.region.data.data_ptr() - block * stride
                assert cache[block].is_contiguous() and at % 64 == 0
                used[at : at + cache[block].numel() * cache.element_size()] += 1
        assert used.max() == 1, "two caches have the same bytes"
        assert used.sum() == handles[-1].end - handles[0].begin


def test_blocks_are_not_a_multiple_of_a_page_apart() -> None:
    big = caches(replace(SPEC, kv_heads=8, head_size=128, head_size_v=128))
    assert big[0].end * 3 % 4096 == 0, "the case is not the one meant"
    assert big[0].region.data.stride(0) % 4096 == 64


def test_blocks_move_with_whatever_layers_are_named() -> None:
    other = KVSpec(kv_heads=1, head_size=32, head_size_v=8, dtype="float32", layers=(3,))
    for pick in ([0, 1, 2, 3], [0, 1], [2, 0], [3], [1, 3]):
        handles = caches(SPEC, other)
        chosen = [handles[i] for i in pick]
        before = [(h.k.clone(), h.v.clone()) for h in handles]
        ops = CpuOps()
        data = ops.export_blocks(chosen, [4, 7])
        wanted = [c[b].flatten().view(torch.uint8) for b in (4, 7) for i in pick for c in before[i]]
        assert torch.equal(data, torch.cat(wanted).view(2, -1))
        ops.copy_blocks(chosen, [(1, 2), (2, 5)])
        ops.import_blocks(data, chosen, [8, 0])
        for i, (handle, old) in enumerate(zip(handles, before, strict=True)):
            for cache, was in zip((handle.k, handle.v), old, strict=True):
                if i in pick:
                    for to, source in ((2, 1), (5, 1), (8, 4), (0, 7)):
                        was[to] = was[source]
                assert torch.equal(cache, was), f"layer {i} of {pick}"


def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []

    def populate(address: int, nbytes: int) -> bool:
        found.append((address, nbytes))
        return True

    monkeypatch.setattr(huge_pages, "populate", populate)
    return found


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "octavo-kv-memory":
            thread.join()


def test_memory_is_asked_for_ahead_of_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = asked(monkeypatch)
    block = 1 << 20
    region = kv.Region(8192, block)
    stride, base = region.data.stride(0), region.data.data_ptr()
    wait_for_threads()

    def ready() -> int:
        at = base
        for begin, size in spans:  # end to end, nothing twice
            assert begin == at
            at += size
        return at - base

    assert ready() == kv.READY
    first = (kv.READY - kv.AHEAD) // stride  # behind it there is less than what is kept ahead
    region.use(first + 3)  # too little to ask for
    wait_for_threads()
    assert ready() == kv.READY
    region.use(first + 40)
    wait_for_threads()
    assert ready() == (first + 41) * stride + kv.AHEAD
    region.use(8191)
    wait_for_threads()
    assert ready() == 8192 * stride, "all there is, and no more"
    region.use(0)
    wait_for_threads()
    assert ready() == 8192 * stride


def test_a_small_cache_holds_little_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = asked(monkeypatch)
    region = kv.Region(400, 1 << 20)
    wait_for_threads()
    size = region.data.nbytes

    def ready() -> int:
        return sum(size for _, size in spans)

    assert ready() == region.data.stride(0) + size // kv.AHEAD_SHARE
    region.use(300)
    wait_for_threads()
    assert ready() == 301 * region.data.stride(0) + size // kv.AHEAD_SHARE


def test_a_cache_of_some_size_holds_a_part_of_the_rest_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans = asked(monkeypatch)
    region = kv.Region(2048, 1 << 20)
    wait_for_threads()
    assert sum(size for _, size in spans) == (region.data.nbytes - kv.SMALL) // kv.READY_SHARE


def test_a_system_that_cannot_be_asked_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def populate(address: int, nbytes: int) -> bool:
        calls.append(address)
        return False

    monkeypatch.setattr(huge_pages, "populate", populate)
    region = kv.Region(64, 8 << 20)
    wait_for_threads()
    for block in range(64):
        region.use(block)
        wait_for_threads()
    assert len(calls) == 1


def gives_memory_when_asked() -> bool:
    """Linux does from 5.14 on."""
    major, minor = platform.release().split(".")[:2]
    return sys.platform == "linux" and (int(major), int(minor)) >= (5, 14)


def test_memory_that_was_asked_for_is_written_without_a_fault_and_keeps_what_it_holds() -> None:
    size = 16 << 20
    data = huge_pages.empty(size)
    data[0] = 7
    given = huge_pages.populate(data.data_ptr(), size)
    assert given == gives_memory_when_asked()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    data[1:].fill_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert data[0] == 7
    assert faults < 100 or not given  # of 4,096 small pages
