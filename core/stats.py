"""What a scheduler counts."""

from __future__ import annotations

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and what holds now. KV numbers are in blocks or slots (tokens)."""

    running: int
    waiting: int
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
    finished: dict[str, int]
