"""The host pool alone: who owns a slot, what is found again, what goes first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.blocks import BlockAuditError, OutOfBlocks
from octavo.core.host_pool import HostPool


def key(number: int) -> bytes:
    return bytes([number])


def test_what_was_evicted_is_found_and_the_least_recently_used_goes_first() -> None:
    pool = HostPool(2)
    first, second = pool.offer(key(1)), pool.offer(key(2))
    assert {first, second} == {0, 1}
    assert pool.find(key(1)) == first and pool.find(key(3)) is None
    assert pool.offer(key(1)) is None  # it is here already, and was used just now
    assert pool.offer(key(3)) == second
    assert pool.find(key(2)) is None and pool.find(key(1)) == first
    assert pool.evictions == 1
    pool.check([])


def test_pinned_slots_stay() -> None:
    pool = HostPool(2)
    kept = pool.offer(key(1))
    assert pool.pin(key(1)) == kept
    held = pool.hold()
    assert pool.offer(key(2)) is None
    with pytest.raises(OutOfBlocks, match="all 2 blocks of host memory are pinned"):
        pool.hold()
    pool.check([kept, held])
    pool.unpin(held)  # it has no hash: nobody can find it any more
    assert pool.num_used == 1
    pool.unpin(kept)
    assert pool.find(key(1)) == kept
    pool.check([])
    with pytest.raises(BlockAuditError, match=f"host slot {kept}"):
        pool.unpin(kept)


def test_a_promised_slot_is_filled_when_the_device_evicts() -> None:
    pool = HostPool(1)
    slot = pool.pin(key(1))
    assert pool.find(key(1)) is None and pool.wants(key(1))
    assert pool.offer(key(2)) is None
    assert pool.offer(key(1)) == slot
    assert pool.find(key(1)) == slot and not pool.wants(key(1))
    pool.check([slot])


def test_a_promise_that_was_not_needed_leaves_nothing() -> None:
    pool = HostPool(1)
    pool.unpin(pool.pin(key(1)))
    assert pool.num_used == 0
    pool.check([])


def test_two_may_count_on_one_slot() -> None:
    pool = HostPool(3)
    a, b = pool.pin(key(1)), pool.pin(key(1))
    assert a == b and pool.num_used == 1
    pool.offer(key(1))
    pool.unpin(a)
    assert pool.num_pinned == 1
    pool.check([b])


def test_what_a_step_reads_stays_until_it_is_done() -> None:
    pool = HostPool(1)
    slot = pool.offer(key(1))
    pool.read(slot)
    assert pool.offer(key(2)) is None
    pool.check([])
    pool.begin_step()
    assert pool.offer(key(2)) == slot


def test_what_never_came_is_not_found() -> None:
    pool = HostPool(3)
    lost, promised, private = pool.offer(key(1)), pool.pin(key(2)), pool.hold()
    pool.offer(key(2))
    for slot in (lost, promised, private):
        pool.void(slot)
    assert pool.find(key(1)) is None and pool.find(key(2)) is None and not pool.filled(private)
    assert pool.wants(key(2))  # should it be computed again and evicted
    pool.check([promised, private])
    pool.unpin(promised)
    pool.unpin(private)
    assert pool.num_used == 0
    pool.check([])


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), max_size=60),
)
def test_any_order_of_moves(slots: int, moves: list[tuple[int, int]]) -> None:
    pool = HostPool(slots)
    owned: list[int] = []
    for move, number in moves:
        room = slots - pool.num_pinned
        if move == 0:
            pool.offer(key(number))
        elif move == 1 and (room or pool.is_pinned(key(number))):
            owned.append(pool.pin(key(number)))
        elif move == 2 and room:
            owned.append(pool.hold())
        elif move == 3 and owned:
            pool.unpin(owned.pop(number % len(owned)))
        elif move == 4 and (slot := pool.find(key(number))) is not None:
            pool.read(slot)
        elif move == 5:
            pool.begin_step()
        elif move == 6:
            pool.void(number % slots)
        pool.check(owned)
        assert pool.num_used <= slots
    pool.begin_step()
    for slot in owned:
        pool.unpin(slot)
    pool.check([])
    assert pool.num_pinned == 0
    assert Counter(map(pool.find, map(key, range(8))))[None] >= 8 - slots
