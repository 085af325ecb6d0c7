"""Host memory in huge pages: what is handed out, and when it goes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from octavo.core import huge_pages


@pytest.fixture(params=[True, False], ids=["huge", "small"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(huge_pages, "available", lambda: False)


@pytest.mark.usefixtures("system")
def test_parts_are_apart_aligned_and_writable() -> None:
    sizes = [1, 63, 64, 65, 0, 5000, 3 << 20, huge_pages.PAGE * 9, 100, 20 << 20, 20 << 20]
    parts = [huge_pages.empty(size) for size in sizes]
    for i, part in enumerate(parts):
        assert part.dtype == torch.uint8 and part.shape == (sizes[i],)
        assert not part.numel() or part.data_ptr() % 64 == 0
        part.fill_(i + 1)
    for i, part in enumerate(parts):
        assert bool((part == i + 1).all())


def test_a_large_part_begins_at_a_huge_page() -> None:
    if huge_pages.available():
        assert huge_pages.empty(huge_pages.PAGE * 20).data_ptr() % huge_pages.PAGE == 0


def test_memory_goes_with_the_last_part_of_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    if not huge_pages.available():
        pytest.skip("chunks are of huge pages")
    monkeypatch.setattr(huge_pages, "_chunk", None)  # others hold parts of the one there is
    first, second = huge_pages.empty(1000), huge_pages.empty(1000)
    assert second.data_ptr() - first.data_ptr() == 1024
    chunk = huge_pages._chunk
    assert chunk is not None
    del first
    gc.collect()
    assert chunk() is not None
    second.fill_(7)
    del second
    gc.collect()
    assert chunk() is None
    huge_pages.empty(10).fill_(1)  # of a new one


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages"
)
def test_huge_pages_are_asked_for() -> None:
    large = huge_pages.empty(32 << 20)
    middle, flags = large.data_ptr() + (16 << 20), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            begin, end = (int(at, 16) for at in words[0].split("-"))
            inside = begin <= middle < end
        elif words[0] == "VmFlags:" and inside:
            flags = line
    assert " hg" in flags
    large.fill_(3)
    assert bool((large == 3).all())


@pytest.mark.usefixtures("system")
def test_results_in_use_lie_apart() -> None:
    recycled = huge_pages.Recycled()
    held = [recycled.empty(rows, 49152) for rows in (1, 64, 16, 64, 400)]
    for i, result in enumerate(held):
        assert result.dtype == torch.float32 and result.shape == ((1, 64, 16, 64, 400)[i], 49152)
        result.fill_(i)
    for i, result in enumerate(held):
        assert bool((result == i).all())


def test_memory_of_results_that_nobody_holds_is_handed_out_again() -> None:
    if not huge_pages.available():
        pytest.skip("results are the allocator's")
    recycled = huge_pages.Recycled()
    first = recycled.empty(64, 49152)
    at = first.data_ptr()
    rows = first[3:5]  # whoever holds a part holds the whole
    del first
    gc.collect()
    rows.fill_(7)
    second = recycled.empty(64, 49152).fill_(1)
    assert second.data_ptr() != at and bool((rows == 7).all())
    row = rows.numpy()[0]
    del rows
    gc.collect()
    third = recycled.empty(64, 49152).fill_(2)
    assert third.data_ptr() != at and bool((row == 7).all())
    del row, third
    gc.collect()
    places = {recycled.empty(rows, 49152).data_ptr() for rows in range(64, 20, -1)}
    assert len(places) == 1 and second.data_ptr() not in places


def test_memory_of_results_is_let_go_where_larger_ones_follow() -> None:
    if not huge_pages.available():
        pytest.skip("results are the allocator's")
    recycled = huge_pages.Recycled()
    for rows in range(8, 320, 8):  # each is dropped at once
        recycled.empty(rows, 49152)
    assert len(recycled._kept) == 1
    largest = recycled.empty(400, 49152)  # too large to keep
    assert len(recycled._kept) == 1 and largest.numel() == 400 * 49152
