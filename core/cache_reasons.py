"""Why prompt tokens were computed although there is a prefix cache.

Asked once for a request, when it is admitted; nothing is counted by token. What is said of a request
depends on its own tokens and on what is known under its own salt and adapter, never on what other
tenants have sent under theirs: a salt keeps tenants from learning of each other's prompts, and "known
under another salt" would tell just that.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from octavo.core.blocks import BlockManager
from octavo.core.sequence import Sequence
from octavo.core.types import MissReason

if TYPE_CHECKING:
    from octavo.core.roster import Roster


def miss_reason(sequence: Sequence, blocks: BlockManager, shares: bool) -> MissReason:
    """Why the tokens of a starting sequence from `num_computed` on are not taken from the cache.

    Args:
        sequence: its cached blocks are in its table; where `shares`, the hashes of its full blocks are
            known.
        shares: whether sequences take blocks over at all.
    """
    if not shares:
        return "off"
    if sequence.computes_all:
        return "pooling"
    if sequence.wants_prompt_logprobs:
        return "prompt_logprobs"
    size = blocks.block_size
    place = sequence.num_computed // size
    if place >= (sequence.num_tokens - 1) // size:
        return "below_block"
    if blocks.was_evicted(sequence.hashes[place]):
        return "evicted"
    request = sequence.request
    if place == 0 and (request.cache_salt is not None or request.adapter is not None):
        return "salted"
    return "diverged"


def account_hits(roster: Roster, sequence: Sequence, hits: SequenceOf[int], shares: bool) -> None:
    """Counts what a starting sequence found. hits: where its cached blocks were; negative: on the host."""
    timings, counts = sequence.timings, roster.counts
    if sequence.preemptions:
        timings.num_recomputed_tokens += sequence.num_tokens - sequence.num_computed
        return
    sequence.num_cached = sequence.num_computed
    timings.num_cached_tokens = sequence.num_computed
    counts["query"] += sequence.num_tokens
    counts["hit"] += sequence.num_computed
    counts["host_hit"] += sum(hit < 0 for hit in hits) * roster.blocks.block_size
    reason = miss_reason(sequence, roster.blocks, shares)
    timings.cache_miss = reason
    roster.misses[reason] += sequence.num_tokens - sequence.num_computed
