"""How a step is cut for the kernels with static shapes. Needs no jax."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.pallas import tiles


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int, int]:
    """(context, queries) of each sequence, padding tokens and sequences, and a tile's size."""
    sequences = [
        (queries + draw(st.integers(0, 70)), queries)
        for queries in draw(st.lists(st.integers(1, 40), max_size=6))
    ]
    return (
        sequences,
        draw(st.integers(0, 9)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([1, 8, 32])),
    )


@settings(deadline=None)
@given(steps())
def test_every_query_is_in_one_tile_of_its_own_sequence(
    step: tuple[list[tuple[int, int]], int, int, int],
) -> None:
    sequences, pad, pad_seqs, size = step
    contexts = np.array([c for c, _ in sequences] + [0] * pad_seqs, np.int32)
    counts = [n for _, n in sequences] + [0] * pad_seqs
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = int(start[-1]) + pad
    cut = tiles.cut(start, contexts, tokens, size)
    assert len(cut.seq) == tiles.tile_count(tokens, len(contexts), size)
    assert cut.rows.shape == (len(cut.seq), size)
    assert (np.diff((cut.end > 0).astype(int)) <= 0).all(), "tiles without work come last"
    for s, (context, queries) in enumerate(sequences):
        for i in range(queries):
            token = int(start[s]) + i
            tile, place = divmod(int(cut.row_of[token]), size)
            assert cut.seq[tile] == s
            assert cut.rows[tile, place] == token
            assert cut.first[tile] + place == context - queries + i  # its position
            assert cut.end[tile] > context - queries + i
            assert cut.end[tile] <= context


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 50)), max_size=5), st.integers(0, 5))
def test_write_groups_hold_every_slot_once(runs: list[tuple[int, int]], pad: int) -> None:
    """Sequences own blocks of their own and write runs of slots in them."""
    slots = np.concatenate(
        [np.arange(first, first + n) + 8 * 16 * (i + 1) for i, (first, n) in enumerate(runs)]
        + [np.full(pad, -1)]
    ).astype(np.int64)
    ids, tokens = tiles.write_groups(slots, max(1, len(runs)), 8)
    used = (tokens >= 0).any(axis=1)
    assert len(set(ids[used].tolist())) == used.sum()
    assert (ids[~used] == 0).all()
    found = {
        int(ids[i]) * 8 + at: int(tokens[i, at])
        for i, at in zip(*np.nonzero(tokens >= 0), strict=True)
    }
    assert found == {int(slot): i for i, slot in enumerate(slots) if slot >= 0}


@pytest.mark.parametrize("offset", range(8))
def test_the_worst_steps_fit_into_their_groups(offset: int) -> None:
    """Every sequence begins and ends inside a group."""
    for n in range(1, 40):
        runs = [np.arange(n) + 128 * i + offset for i in range(1, 4)]
        tiles.write_groups(np.concatenate(runs).astype(np.int64), 3, 8)
