"""What a scheduler counts."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from octavo.core.sequence import Sequence
from octavo.core.types import MissReason


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and what holds now. KV numbers are in blocks or slots (tokens).

    `waiting_for_prefix` of the `waiting` sequences wait for blocks that a running one is computing,
    the others for room."""

    running: int
    waiting: int
    waiting_for_prefix: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_slots_allocated: int
    kv_slots_used: int
    kv_slots_wasted: int
    steps: int
    requests: int
    preemptions: int
    evictions: int
    prompt_tokens: int
    output_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_miss_tokens: dict[MissReason, int]  # by reason; with the hits all that were queried
    prefix_waits: int  # times that a sequence was made to wait for a prefix
    finished: dict[str, int]
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of those drafted
    host_blocks_total: int = 0  # of the host pool
    host_blocks_used: int = 0
    host_blocks_pinned: int = 0  # of those, for sequences that wait
    host_hit_tokens: int = 0  # of the hits, those whose blocks came from the host
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    swaps: int = 0  # of the preemptions, those whose blocks were kept on the host
    compilations: int = 0  # programs that the backend has built; none are built after the start


def unfilled_slots(running: Iterable[Sequence], block_size: int) -> int:
    """Slots of the blocks that running sequences hold which no token fills yet; shared ones count once.

    Asked between two steps, so no walk over all blocks: only those not yet full are looked at.
    """
    empty: dict[int, int] = {}
    for sequence in running:
        for i in range(sequence.num_computed // block_size, sequence.num_blocks):
            block = int(sequence.block_table[i])
            room = block_size - max(0, sequence.num_computed - i * block_size)
            empty[block] = min(empty.get(block, block_size), room)
    return sum(empty.values())
