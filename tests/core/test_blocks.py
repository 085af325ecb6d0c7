"""The block manager alone: reference counts, sharing, the hash chain, the order of eviction."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.blocks import BlockAuditError, BlockManager, OutOfBlocks, extend_hashes, root_hash


def keys(tokens: list[int], size: int = 4, root: bytes = b"r") -> list[bytes]:
    found: list[bytes] = []
    extend_hashes(found, root, np.array(tokens, np.int32), size)
    return found


def test_the_null_block_is_never_handed_out() -> None:
    manager = BlockManager(5, 4)
    assert manager.usable == 4
    assert sorted(manager.allocate(4)) == [1, 2, 3, 4]
    with pytest.raises(OutOfBlocks, match=r"1 KV blocks asked for, 0 of 4 are free"):
        manager.allocate(1)
    with pytest.raises(ValueError, match="at least 2"):
        BlockManager(1, 4)


def test_failed_allocation_takes_nothing() -> None:
    manager = BlockManager(5, 4)
    manager.allocate(2)
    with pytest.raises(OutOfBlocks):
        manager.allocate(3)
    assert manager.num_free == 2


def test_double_free_is_caught() -> None:
    manager = BlockManager(5, 4)
    (block,) = manager.allocate(1)
    manager.free([block])
    with pytest.raises(BlockAuditError, match=f"block {block}"):
        manager.free([block])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (33, 3)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockManager(2, 16).blocks_for(tokens) == blocks


def test_a_freed_block_is_found_again_until_it_is_reused() -> None:
    manager = BlockManager(3, 4)
    table = manager.allocate(2)
    chain = keys(list(range(8)))
    for block, key in zip(table, chain, strict=True):
        manager.remember(block, key)
    manager.free(table)
    assert manager.num_free == 2 and manager.lookup(chain) == table
    manager.acquire(table)
    assert manager.num_free == 0
    manager.free(table)
    manager.allocate(1)
    assert manager.lookup(chain) == table[:1]  # the tail went first
    assert manager.evictions == 1


def test_eviction_prefers_unhashed_blocks_then_the_least_recently_used() -> None:
    manager = BlockManager(6, 4)
    table = manager.allocate(5)
    old, new = keys([1, 1, 1, 1])[0], keys([2, 2, 2, 2])[0]
    manager.remember(table[0], old)
    manager.remember(table[1], new)
    manager.free([table[0]])
    manager.free([table[1]])
    manager.free([table[2]])
    assert manager.allocate(1) == [table[2]]  # knows nothing: costs nothing
    assert manager.lookup([old]) == [table[0]]
    manager.acquire([table[0]])
    manager.free([table[0]])  # used again: now the younger one
    assert manager.allocate(1) == [table[1]]
    assert manager.lookup([new]) == [] and manager.lookup([old]) == [table[0]]


def test_lookup_stops_at_the_first_gap() -> None:
    manager = BlockManager(5, 4)
    chain = keys(list(range(12)))
    table = manager.allocate(3)
    manager.remember(table[0], chain[0])
    manager.remember(table[2], chain[2])
    assert manager.lookup(chain) == table[:1]


def test_a_twin_stays_unhashed() -> None:
    manager = BlockManager(5, 4)
    first, second = manager.allocate(2)
    (key,) = keys([1, 2, 3, 4])
    manager.remember(first, key)
    manager.remember(second, key)
    assert manager.lookup([key]) == [first]
    manager.free([first, second])
    manager.check([])
    assert manager.num_cached == 1


def test_caching_off_remembers_nothing() -> None:
    manager = BlockManager(5, 4, prefix_caching=False)
    (block,) = manager.allocate(1)
    (key,) = keys([1, 2, 3, 4])
    manager.remember(block, key)
    assert manager.lookup([key]) == [] and manager.num_cached == 0


def test_reset_forgets_but_keeps_owners() -> None:
    manager = BlockManager(5, 4)
    chain = keys(list(range(8)))
    table = manager.allocate(2)
    for block, key in zip(table, chain, strict=True):
        manager.remember(block, key)
    manager.free(table[1:])
    manager.reset_cache()
    manager.check([table[:1]])
    assert manager.lookup(chain) == [] and manager.num_free == 3


def test_the_chain_depends_on_everything_before() -> None:
    assert keys([1, 2, 3, 4, 5, 6, 7, 8])[1] != keys([0, 2, 3, 4, 5, 6, 7, 8])[1]
    assert keys([1, 2, 3, 4], root=b"a") != keys([1, 2, 3, 4], root=b"b")
    assert len(keys([1] * 7)) == 1  # full blocks only
    grown = keys([1, 2, 3, 4])
    extend_hashes(grown, b"r", np.arange(1, 9, dtype=np.int32), 4)
    assert grown == keys(list(range(1, 9)))


def test_tokens_that_differ_only_above_16_bits_differ() -> None:
    assert keys([1, 2, 3, 4]) != keys([1, 2, 3, 4 + (1 << 16)])
    assert keys([1, 2, 3, 4]) != keys([1, 2, 3, 4 + (1 << 30)])


# -------------------------------------------------------------------- what isolates a chain

DIGEST = bytes(range(32))


def test_roots_are_wide_and_framed() -> None:
    """Adapter, salt and images enter typed and with their length: no two triples meet."""
    low16 = bytes([DIGEST[0] ^ 1]) + DIGEST[1:]
    high = DIGEST[:-1] + bytes([DIGEST[-1] ^ 1])
    triples = [
        (None, None, ()),
        ("a", None, ()),
        (None, "a", ()),
        ("a", "bc", ()),
        ("ab", "c", ()),
        (None, "ab", ()),
        (None, "abc", ()),
        ("", None, ()),
        (None, "", ()),
        (None, "salt:1:a", ()),
        ("a", "salt:1:a", ()),
        ("asalt:1:a", None, ()),
        ("a", "a", ()),
        ("asalt:a", None, ()),
        ("asalta", None, ()),
        (None, None, (b"a",)),
        (None, None, (b"a", b"b")),
        (None, None, (b"b", b"a")),
        (None, None, (b"ab",)),
        (None, None, (DIGEST,)),
        (None, None, (low16,)),
        (None, None, (high,)),
        (None, None, (DIGEST, DIGEST)),
    ]
    roots = [root_hash(*t) for t in triples]
    assert all(len(root) >= 16 for root in roots)
    for (a, x), (b, y) in itertools.combinations(zip(triples, roots, strict=True), 2):
        assert x != y, (a, b)


text = st.text("asltdper:0123", max_size=12)


@settings(max_examples=300, deadline=None)
@given(*[st.tuples(st.none() | text, st.none() | text, st.lists(st.binary(max_size=6)))] * 2)
def test_only_equal_triples_have_equal_roots(a: tuple, b: tuple) -> None:
    assert (root_hash(*a) == root_hash(*b)) == (a == b)


def test_a_salt_that_is_no_valid_utf8_has_a_root() -> None:
    """JSON can carry a lone surrogate; it must not become an exception in the scheduler."""
    assert root_hash(None, "\ud800", ()) != root_hash(None, "\ud801", ())


# ------------------------------------------------------------------------------- the audit


def break_refs(m: BlockManager, table: list[int]) -> None:
    m._refs[table[0]] += 1


def break_free_list(m: BlockManager, table: list[int]) -> None:
    m._unhashed.append(m._unhashed[0])


def break_index(m: BlockManager, table: list[int]) -> None:
    m._cached[b"nobody"] = table[0]


def break_null(m: BlockManager, table: list[int]) -> None:
    m._refs[0] = 1


def break_leak(m: BlockManager, table: list[int]) -> None:
    m._unhashed.pop()


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (break_refs, "ref count"),
        (break_free_list, "free twice"),
        (break_index, "index differ"),
        (break_null, "null block"),
        (break_leak, "free lists"),
    ],
)
def test_the_audit_sees_it(breakage, words: str) -> None:
    manager = BlockManager(6, 4)
    table = manager.allocate(2)
    manager.check([table])
    breakage(manager, table)
    with pytest.raises(BlockAuditError, match=words):
        manager.check([table])


def test_the_audit_sees_a_table_that_nobody_counted() -> None:
    manager = BlockManager(6, 4)
    table = manager.allocate(2)
    with pytest.raises(BlockAuditError, match="2 owners, ref count 1"):
        manager.check([table, table[:1]])


# ------------------------------------------------------------------- resting and pinned blocks


class Copying:
    """A transfer that ends when it is told to, or waited for."""

    def __init__(self) -> None:
        self.ended = self.waited = False

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.ended = self.waited = True


def test_a_freed_block_rests() -> None:
    drained: list[int] = []
    made = BlockManager(4, 4, rest=2, drain=lambda: drained.append(made.num_resting))
    made.begin_step(1)
    blocks = made.allocate(3)
    made.free(blocks[:1])
    assert (made.num_free, made.num_resting, made.num_used) == (0, 1, 2)
    made.begin_step(2)
    made.free(blocks[1:2])
    made.begin_step(3)
    assert made.num_free == 0
    made.begin_step(4)  # steps 2 and 3 came after the first was freed
    assert (made.num_free, made.num_resting) == (1, 1)
    made.check([blocks[2:]])
    assert made.settle() and drained == [1] and made.num_free == 2
    assert not made.settle()


def test_a_cached_block_is_taken_over_while_it_rests() -> None:
    made = BlockManager(4, 4, rest=5)
    (block,) = made.allocate(1)
    made.remember(block, b"x")
    made.free([block])
    made.acquire(made.lookup([b"x"]))
    assert made.num_resting == 0
    made.check([[block]])
    made.free([block])
    made.settle()
    made.check([])
    assert made.lookup([b"x"]) == [block]


def test_a_transfer_pins_its_blocks() -> None:
    made, copying = BlockManager(4, 4), Copying()
    blocks = made.allocate(2)
    made.pin(blocks, copying)  # type: ignore[arg-type]
    assert made.is_shared(blocks[0])  # a writer would get a copy
    made.free(blocks)
    made.begin_step(1)
    assert made.num_free == 1
    made.check([])
    copying.ended = True
    made.begin_step(2)
    assert made.num_free == 3 and not copying.waited
    made.check([])
    again = Copying()
    made.pin(made.allocate(1), again)  # type: ignore[arg-type]
    assert made.settle() and again.waited
