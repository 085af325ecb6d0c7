"""KV block manager: who owns which block of the KV cache, and what may be shared.

Blocks are ref-counted. A block is shared by prefix hits and by forks, and copied on the first write
to it (copy-on-write, PagedAttention, Kwon et al. 2023, section 4.3). A full block is known by a hash
chain over its tokens and all before it; a free block keeps its hash until it is reused, so a later
prompt may take it back. Reuse order: blocks without a hash first, then least recently used, and of
one sequence the tail first. Where a device may read a block after it was freed, it *rests* for some
steps before it counts as free; one that a transfer to the host reads is *pinned* until that is done. Block 0 is the null block: padding points at it and nobody owns it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from octavo.core.types import Int32

if TYPE_CHECKING:
    from octavo.core.contract_data import Transfer

BlockHash = bytes


def root_hash(adapter: str | None, salt: str | None, image_hashes: Sequence[bytes]) -> BlockHash:
    """The start of a hash chain: all that changes KV content beside the tokens.

    Each field is framed by its type and length, so that no two different triples spell the same bytes.
    """
    digest = hashlib.blake2b(digest_size=32)
    fields: list[tuple[bytes, bytes]] = []
    if adapter is not None:
        fields.append((b"adapter", adapter.encode(errors="surrogatepass")))
    if salt is not None:
        fields.append((b"salt", salt.encode(errors="surrogatepass")))
    fields.extend((b"image", image) for image in image_hashes)
    for kind, value in fields:
        digest.update(b"%s:%d:" % (kind, len(value)))
        digest.update(value)
    return digest.digest()


def extend_hashes(hashes: list[BlockHash], root: BlockHash, tokens: Int32, block_size: int) -> None:
    """Appends to `hashes` those of the further full blocks of `tokens` [n] int32."""
    parent = hashes[-1] if hashes else root
    full = len(tokens) // block_size * block_size
    data = tokens[len(hashes) * block_size : full].tobytes()
    size = block_size * tokens.itemsize
    for at in range(0, len(data), size):
        parent = hashlib.blake2b(parent + data[at : at + size], digest_size=32).digest()
        hashes.append(parent)


class OutOfBlocks(RuntimeError):
    """More blocks asked for than are free: the caller did not check `num_free`."""


_EVICTED_PER_BLOCK = 4
"""Hashes of evicted blocks that are remembered, for each block in the pool."""


class BlockAuditError(AssertionError):
    """`BlockManager.check` found an invariant broken."""


class BlockManager:
    """Hands out block ids; knows nothing of tensors.

    Args:
        num_blocks: blocks in the pool, the null block included.
        block_size: tokens in a block.
        prefix_caching: whether full blocks are remembered by hash.
        rest: steps after a block was freed in which it is not written.
        drain: waits until the device reads no freed block any more.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        rest: int = 0,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"the KV cache needs at least 2 blocks (one is the null block), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._refs = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, int] = {}
        self._unhashed = list(range(num_blocks - 1, 0, -1))  # a stack: the last is taken first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._evicted: OrderedDict[BlockHash, None] = OrderedDict()  # known once; oldest first
        self._rest, self._drain = rest, drain
        self._resting: OrderedDict[int, int] = OrderedDict()  # block -> the step it was freed in
        self._step = 0
        self._pins: list[tuple[list[int], Transfer]] = []
        self.evictions = 0
        self.frees = 0  # calls that may have made room
        # Told of a block that is forgotten to be reused, and of its hash.
        self.offer: Callable[[int, BlockHash], None] | None = None

    @property
    def usable(self) -> int:
        """Blocks that sequences may own: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._unhashed) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.usable - self.num_free - len(self._resting)

    @property
    def num_resting(self) -> int:
        """Blocks that nobody owns and that are not free yet."""
        return len(self._resting)

    @property
    def num_cached(self) -> int:
        """Blocks known by hash, in use or free."""
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody owns."""
        refs = self._refs
        return sum([refs[block] == 0 for block in blocks])

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1

    def owners(self, block: int) -> int:
        """How many tables a block stands in."""
        return self._refs[block]

    def is_private(self, block: int) -> bool:
        """Whether one sequence has it, and nobody else could find it."""
        return self._refs[block] == 1 and self._hash_of[block] is None

    def find(self, key: BlockHash) -> int | None:
        """The block that is known by this hash."""
        return self._cached.get(key)

    def lookup(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix of `hashes`. Changes nothing."""
        found = []
        cached = self._cached.get
        for key in hashes:
            block = cached(key)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, forgetting what the least useful of them cached.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocks(
                f"{count} KV blocks asked for, {self.num_free} of {self.usable} are free"
            )
        taken = []
        for _ in range(count):
            if self._unhashed:
                block = self._unhashed.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                self._evict(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more owner for each block: a prefix hit or a fork."""
        for block in blocks:
            if self._refs[block] == 0 and self._resting.pop(block, None) is None:
                del self._evictable[block]
            self._refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One owner less for each block of a table, the tail first."""
        self.frees += 1
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            if refs < 0:
                raise BlockAuditError(f"block {block} was freed more often than it was taken")
            self._refs[block] = refs
            if refs == 0:
                if self._rest:
                    self._resting[block] = self._step
                elif self._hash_of[block] is None:
                    self._unhashed.append(block)
                else:
                    self._evictable[block] = None

    def pin(self, blocks: Sequence[int], transfer: Transfer) -> None:
        """Keeps blocks as they are, whoever frees them, until `transfer` is done.

        Those of a running sequence must be full: it does not ask before it writes to its last one.
        """
        self.acquire(blocks)
        self._pins.append((list(blocks), transfer))

    def begin_step(self, step: int) -> None:
        """Frees what has rested long enough when step number `step` is planned, and what no transfer
        reads any more."""
        self._step = step
        if self._pins:
            self._unpin([pin for pin in self._pins if pin[1].done()])
        if self._resting:
            self._wake(step - self._rest)

    def settle(self) -> bool:
        """Waits for the device and for all transfers, when nothing can run before blocks are free.
        False when there was nothing to wait for."""
        if not self._resting and not self._pins:
            return False
        for _, transfer in self._pins:
            transfer.wait()
        self._unpin(list(self._pins))
        self._drain()
        self._wake(self._step + 1)
        return True

    def _unpin(self, ended: list[tuple[list[int], Transfer]]) -> None:
        for pin in ended:
            self._pins.remove(pin)
            self.free(pin[0])

    def _wake(self, before: int) -> None:
        """Frees the resting blocks that were given back before step `before` was planned."""
        woken = []
        for block, step in self._resting.items():
            if step >= before:
                break
            woken.append(block)
        for block in woken:
            del self._resting[block]
            if self._hash_of[block] is None:
                self._unhashed.append(block)
            else:
                self._evictable[block] = None
        if woken:
            self.frees += 1

    def remember(self, block: int, key: BlockHash) -> None:
        """Makes a full block findable. The first block with a hash keeps it; a twin stays unhashed."""
        if self.prefix_caching and self._hash_of[block] is None and key not in self._cached:
            self._cached[key] = block
            self._hash_of[block] = key
            if self._evicted:
                self._evicted.pop(key, None)

    def forget(self, block: int) -> None:
        """Makes a block unfindable: it does not hold what its hash says."""
        key = self._hash_of[block]
        if key is not None:
            del self._cached[key]
            self._hash_of[block] = None
            if block in self._evictable:
                del self._evictable[block]
                self._unhashed.append(block)

    def reset_cache(self) -> None:
        """Forgets every hash; blocks in use stay with their owners."""
        self._cached.clear()
        self._evicted.clear()
        self._hash_of = [None] * self.num_blocks
        self._unhashed.extend(self._evictable)
        self._evictable.clear()

    def was_evicted(self, key: BlockHash) -> bool:
        """Whether a block was known by this hash and had to go. A bounded number is remembered."""
        return key in self._evicted

    def _evict(self, block: int) -> None:
        key = self._hash_of[block]
        assert key is not None
        del self._cached[key]
        self._hash_of[block] = None
        self.evictions += 1
        if self.offer is not None:
            self.offer(block, key)
        self._evicted[key] = None
        if len(self._evicted) > _EVICTED_PER_BLOCK * self.num_blocks:
            self._evicted.popitem(last=False)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Audits every invariant against the block tables of all live sequences.

        Raises:
            BlockAuditError: what does not hold.
        """
        owners = [0] * self.num_blocks
        for table in tables:
            for block in table:
                owners[block] += 1
        for block in [block for pinned, _ in self._pins for block in pinned]:
            owners[block] += 1
        problems = []
        if owners[0] or self._refs[0]:
            problems.append("the null block has an owner")
        for block in range(1, self.num_blocks):
            if owners[block] != self._refs[block]:
                problems.append(
                    f"block {block}: {owners[block]} owners, ref count {self._refs[block]}"
                )
        free = [*self._unhashed, *self._evictable, *self._resting]
        if len(set(free)) != len(free):
            problems.append("a block is free twice")
        if set(free) != {b for b in range(1, self.num_blocks) if self._refs[b] == 0}:
            problems.append("the free lists are not the blocks with ref count 0")
        if any(self._hash_of[b] is not None for b in self._unhashed):
            problems.append("a hashed block stands among the unhashed ones")
        if any(self._hash_of[b] is None for b in self._evictable):
            problems.append("an unhashed block stands among the evictable ones")
        index = {key: b for b, key in enumerate(self._hash_of) if key is not None}
        if index != self._cached:
            problems.append("hashes and their index differ")
        if not self._evicted.keys().isdisjoint(self._cached):
            problems.append("a cached block counts as evicted")
        if len(self._evicted) > _EVICTED_PER_BLOCK * self.num_blocks:
            problems.append("too many evicted blocks are remembered")
        if problems:
            raise BlockAuditError("; ".join(problems[:10]))
