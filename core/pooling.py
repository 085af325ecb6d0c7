"""Prompts that are embedded instead of continued: what a request asks for, what a model offers, and how
such a sequence ends. The arithmetic is in `pooler.py`.

An embedded prompt runs as any other does: in chunks beside decoding sequences, preempted and computed
again. It draws nothing and ends with its last token. Pooling "last" may begin behind cached blocks; "mean"
and "cls" need hidden states of positions that would lie in them, so they compute all of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from octavo.core.roster import Roster
    from octavo.core.sequence import Sequence
    from octavo.core.types import SequenceUpdate

PoolingKind = Literal["mean", "last", "cls"]
Task = Literal["generate", "embed"]


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What becomes of a prompt's hidden states.

    kind: their mean, the last token's, or the first one's ("cls"). normalize: to length 1. dimensions: only
    the first so many numbers, brought to length 1 again; None: all.
    """

    kind: PoolingKind
    normalize: bool = True
    dimensions: int | None = None


class EmbeddingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a model embeds.

    pooling, normalize: what its checkpoint says, or the operator. source: who said so. size: numbers in an
    embedding. dimensions: shorter ones that may be asked for; empty: any number below `size`; None: none.
    max_tokens: of a prompt. lowercase: texts are brought to lower case first.
    """

    pooling: PoolingKind
    normalize: bool
    source: str
    size: int
    dimensions: tuple[int, ...] | None = None
    max_tokens: int
    lowercase: bool = False


def finish_pooled(
    roster: Roster, sequence: Sequence, pooled: Mapping[str, bytes]
) -> list[SequenceUpdate]:
    """Ends a sequence whose prompt is computed, with its embedding out of `StepResult.pooled`."""
    embedding = pooled.get(sequence.request.id)
    if embedding is None:
        message = "the hidden states of the prompt were not finite"
        return roster.finish(sequence, [], "error", message)
    updates = roster.finish(sequence, [], "stop", None)
    return [msgspec.structs.replace(update, embedding=embedding) for update in updates]
