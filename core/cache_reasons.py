"""Why prompt tokens were computed although there is a prefix cache.

Asked once for a request, when it is admitted; nothing is counted by token. What is said of a request
depends on its own tokens and on what is known under its own salt and adapter, never on what other
tenants have sent under theirs: a salt keeps tenants from learning of each other's prompts, and "known
under another salt" would tell just that.
"""

from __future__ import annotations

from octavo.core.blocks import BlockManager
from octavo.core.sequence import Sequence
from octavo.core.types import MissReason


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
