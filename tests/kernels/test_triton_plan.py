"""How attention is cut into work items, and which tiles kernels are launched with: neither needs triton."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.triton import tiles
from octavo.kernels.triton.attention_plan import LEAST_KEYS, Cut, cut_tiles

SEQUENCES = st.lists(
    st.integers(0, 3000).flatmap(lambda c: st.tuples(st.integers(0, min(c, 300)), st.just(c))),
    min_size=1,
    max_size=8,
)


@given(
    sequences=SEQUENCES,
    tokens=st.integers(1, 64),
    keys=st.sampled_from([16, 32, 64]),
    programs=st.integers(1, 9),
    workers=st.integers(1, 300),
    window=st.sampled_from([0, 1, 50, 700]),
)
def test_every_query_meets_every_key_it_sees_once(
    sequences: list[tuple[int, int]],
    tokens: int,
    keys: int,
    programs: int,
    workers: int,
    window: int,
) -> None:
    queries, contexts = (np.array(x, np.int32) for x in zip(*sequences, strict=True))
    cut = Cut(tokens, keys, programs, workers, window)
    width = 7
    found = cut_tiles(queries, contexts, width, cut)
    tiles_of = -(-queries // tokens)
    assert len(found.items) <= cut.most_items(int(tiles_of.sum()))
    assert found.parts <= cut.most_parts and len(found.merges) <= cut.most_merges
    ranges: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for sequence, first, begin, end, table, part, *_ in found.items.tolist():
        assert table == sequence * width and begin % keys == 0
        ranges.setdefault((sequence, first), []).append((begin, end, part))
    assert len(ranges) == int(tiles_of.sum())
    merged = {(s, first): (part, count) for s, first, part, count, *_ in found.merges.tolist()}
    used: list[int] = []
    for (sequence, first), pieces in ranges.items():
        query, context = int(queries[sequence]), int(contexts[sequence])
        pieces.sort()
        last = context - query + min(first + tokens, query) - 1
        oldest = max(0, context - query + first - window + 1) if window else 0
        assert pieces[0][0] == oldest // keys * keys and pieces[-1][1] == last + 1
        assert all(a[1] == b[0] for a, b in pairwise(pieces))
        if len(pieces) == 1:
            assert pieces[0][2] == -1 and (sequence, first) not in merged
        else:
            part, count = merged[sequence, first]
            assert [p for _, _, p in pieces] == list(range(part, part + count))
            assert all(end - begin >= LEAST_KEYS // 2 for begin, end, _ in pieces[:-1])
            used += range(part, part + count)
    assert sorted(used) == list(range(found.parts))
    lengths = found.items[:, 3] - found.items[:, 2]
    assert (np.diff(lengths) <= 0).all()  # the longest first


def test_only_the_sequences_that_are_named() -> None:
    queries, contexts = np.array([1, 5, 1], np.int32), np.array([9, 9, 9], np.int32)
    found = cut_tiles(queries, contexts, 1, Cut(4, 16, 1, 8), np.array([0, 2], np.int32))
    assert sorted(found.items[:, 0].tolist()) == [0, 2]


def test_a_row_of_padding_is_a_query_without_keys() -> None:
    found = cut_tiles(np.ones(2, np.int32), np.array([40, 0], np.int32), 3, Cut(4, 16, 1, 8))
    assert found.items[:, :4].tolist() == [[0, 0, 0, 40], [1, 0, 0, 0]]


@pytest.mark.parametrize("arch", [*tiles.ARCHS, tiles.INTERPRET])
@pytest.mark.parametrize("kernel", sorted(tiles.TABLES))
def test_every_chip_has_tiles_that_kernels_can_take(arch: str, kernel: str) -> None:
    for size in (16, 64, 128, 256):
        for dtype in ("float32", "float16", "bfloat16"):
            tile = tiles.tile(kernel, arch, size, dtype)
            for value in (tile.block_m, tile.num_warps):
                assert value > 0 and value & (value - 1) == 0
            assert tile.num_stages >= 1
            if kernel.startswith("attention_"):
                assert tile.block_n & (tile.block_n - 1) == 0


def test_a_cache_of_codes_changes_nothing_that_the_work_is_cut_by() -> None:
    changed = []
    for arch in tiles.ARCHS:
        for kernel in ("attention_prefill", "attention_decode"):
            for size in (64, 128, 256):
                plain = tiles.tile(kernel, arch, size, "bfloat16")
                coded = tiles.over_codes(plain, kernel, arch)
                assert (coded.block_m, coded.block_n) == (plain.block_m, plain.block_n)
                if coded != plain:
                    changed.append((arch, kernel, size))
    assert changed == [("gfx90a", "attention_prefill", 64), ("gfx90a", "attention_prefill", 128)]


def test_unlisted_chips_take_the_nearest_older_ones_tiles() -> None:
    wanted = {"sm_87": "sm_86", "sm_103": "sm_100", "sm_121": "sm_120", "sm_75": "sm_80",
              "gfx1150": "gfx1100", "gfx1200": "gfx1201", "gfx908": "gfx90a", "gfx940": "gfx942"}  # fmt: skip
    assert {arch: tiles.fallback_arch(arch) for arch in wanted} == wanted
    with pytest.raises(ValueError, match="no tiles for arch"):
        tiles.tile("write_kv", "xe2", 64, "float16")
    with pytest.raises(ValueError, match="no tiles for kernel"):
        tiles.tile("flash", "sm_90", 64, "float16")
