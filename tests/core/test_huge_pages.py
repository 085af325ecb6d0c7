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
