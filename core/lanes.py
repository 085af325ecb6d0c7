"""A plan's lanes as the scheduler drives them: which may share a step, and what a batch of each holds.

A *mode* is a set of lanes that may run in the same step: an exclusive lane alone, or all the lanes
that are not exclusive. In a mode at most one lane takes the sequences that decode and one the prompts;
in a mixed lane that is the same. Every step has one mode: of those that have something to run, the
one that ran least recently. So with an exclusive lane for prompts and one for decoding, a decode step
follows every prompt step while anything decodes, and a prompt step follows every decode step while a
prompt can run: neither side starves the other.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from octavo.core.contract_data import Lane
from octavo.core.sequence import Sequence

KINDS = ("prefill", "decode", "mixed")


class LaneError(ValueError):
    """Lanes that cannot be driven; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a batch of one lane may hold: the lane's limits, cut to its largest buckets. Without
    `chunked` a sequence has its first tokens in one item, and of later ones one at a time."""

    index: int
    seqs: int
    tokens: int
    rows: int
    chunk_multiple: int
    chunked: bool


@dataclass(frozen=True, slots=True)
class Mode:
    """Lanes that may share a step. `whole`: prompts are computed in one step, or not begun."""

    decode: Room | None
    prompt: Room | None
    whole: bool

    @property
    def shared(self) -> bool:
        """Whether one batch holds both prompts and decoding sequences."""
        return self.decode is self.prompt

    def decodes(self, sequence: Sequence) -> bool:
        """Whether what a running sequence computes next belongs to a lane that decodes: one token that
        is drawn from, behind others that are computed. Where prompts are computed whole it is also
        whatever a preempted sequence has beyond the longest prompt, token by token."""
        computed = sequence.num_computed
        if not computed:
            return False
        return self.whole or (
            sequence.num_tokens - computed == 1
            and sequence.pending_samples == 1
            and sequence.max_len > sequence.num_tokens
            and not sequence.wants_prompt_logprobs
        )


class LaneSet:
    """All lanes of a plan.

    Attributes:
        modes: in the order in which they take their first turn.
        max_num_seqs: sequences that may run, so that in every mode all that decode can.
        max_tokens: tokens of the largest batch.
        decode_tokens: tokens of the smallest batch that decodes.
        longest_whole: tokens of the longest prompt; None where prompts are computed in chunks.
        prompt_rows: rows of logits that each lane that takes prompts has for them.
        chunk_multiple: the largest of those lanes.
        max_blocks: blocks of a sequence that every lane has a bucket for; None: any number.

    Raises:
        LaneError: they cannot be driven.
    """

    def __init__(self, lanes: SequenceOf[Lane], max_logits_rows: int) -> None:
        if not lanes:
            raise LaneError("a plan needs at least one lane")
        self._max_logits_rows = max_logits_rows
        rooms = [_room(i, lane, max_logits_rows) for i, lane in enumerate(lanes)]
        prompts = [room for room, lane in zip(rooms, lanes, strict=True) if _takes(lane, "prefill")]
        decodes = [room for room, lane in zip(rooms, lanes, strict=True) if _takes(lane, "decode")]
        for found, what in ((prompts, "prompts"), (decodes, "decoding sequences")):
            if not found:
                raise LaneError(f"no lane takes {what}: {[lane.kinds for lane in lanes]}")
        if len({room.chunked for room in prompts}) > 1:
            raise LaneError("lanes that take prompts must all be chunked, or none")
        self.max_tokens = max(room.tokens for room in rooms)
        self.decode_tokens = min(room.tokens for room in decodes)
        self.chunk_multiple = max(room.chunk_multiple for room in prompts)
        self.longest_whole = None if prompts[0].chunked else min(room.tokens for room in prompts)
        groups = [[room] for room, lane in zip(rooms, lanes, strict=True) if lane.exclusive]
        groups.append([room for room, lane in zip(rooms, lanes, strict=True) if not lane.exclusive])
        groups = sorted((group for group in groups if group), key=lambda group: group[0].index)
        self.modes = tuple(self._mode(group, lanes) for group in groups)
        widest = [max(lane.block_buckets) for lane in lanes if lane.block_buckets]
        self.max_blocks = min(widest, default=None)
        self.max_num_seqs = min(
            _decode_room(mode) for mode in self.modes if mode.decode is not None
        )
        self.prompt_rows = min(mode.prompt.rows for mode in self.modes if mode.prompt is not None)
        if min(self.max_num_seqs, self.prompt_rows) < 1:
            raise LaneError(
                f"{max_logits_rows} rows of logits are too few for a step of these lanes: {lanes}"
            )

    def _mode(self, group: list[Room], lanes: SequenceOf[Lane]) -> Mode:
        def only(kind: str) -> Room | None:
            """The lane of the group that takes `kind`: one for nothing else goes before a mixed one."""
            pure = [r for r in group if _takes(lanes[r.index], kind) and not _mixed(lanes[r.index])]
            found = pure or [r for r in group if _takes(lanes[r.index], kind)]
            if len(found) > 1:
                raise LaneError(
                    f"lanes {found[0].index} and {found[1].index} both take {kind} items in one step: "
                    "make them exclusive, or leave one out"
                )
            return found[0] if found else None

        prompt, decode = only("prefill"), only("decode")
        for room in group:
            if room is not prompt and room is not decode:
                raise LaneError(f"lane {room.index} would never be used: others take all its kinds")
        if prompt is not None and decode is not None and prompt is not decode:
            # Batches of their own in one step, which share the rows of logits of that step.
            beside = self._max_logits_rows - min(decode.seqs, decode.tokens, decode.rows)
            prompt = replace(prompt, rows=min(prompt.rows, beside))
        return Mode(decode, prompt, self.longest_whole is not None)


def _takes(lane: Lane, kind: str) -> bool:
    return kind in lane.kinds or "mixed" in lane.kinds


def _mixed(lane: Lane) -> bool:
    return _takes(lane, "prefill") and _takes(lane, "decode")


def _decode_room(mode: Mode) -> int:
    """Sequences that can decode in a step. A mixed lane keeps a row of logits beside theirs, and may
    have fewer tokens than sequences: these then take turns in the order of service."""
    room = mode.decode
    assert room is not None
    if mode.shared:
        return min(room.seqs, room.rows - 1)
    return min(room.seqs, room.tokens, room.rows)


def _room(index: int, lane: Lane, max_logits_rows: int) -> Room:
    if not lane.kinds or not set(lane.kinds) <= set(KINDS):
        raise LaneError(f"lane {index} has kinds {lane.kinds}; they are of {', '.join(KINDS)}")
    for name in ("max_seqs", "max_tokens", "chunk_multiple"):
        if getattr(lane, name) < 1:
            raise LaneError(
                f"lane {index} has {name} {getattr(lane, name)}, which must be at least 1"
            )
    for name in ("token_buckets", "seq_buckets", "block_buckets", "row_buckets"):
        sizes = getattr(lane, name)
        if list(sizes) != sorted(set(sizes)) or min(sizes, default=1) < 1:
            raise LaneError(f"lane {index} has {name} {sizes}, which must rise from at least 1")
    tokens = min(lane.max_tokens, max(lane.token_buckets, default=lane.max_tokens))
    if lane.chunk_multiple > tokens:
        raise LaneError(
            f"lane {index} wants chunks of a multiple of {lane.chunk_multiple} tokens and holds {tokens}"
        )
    return Room(
        index=index,
        seqs=min(lane.max_seqs, max(lane.seq_buckets, default=lane.max_seqs)),
        tokens=tokens,
        rows=min(max_logits_rows, max(lane.row_buckets, default=max_logits_rows)),
        chunk_multiple=lane.chunk_multiple,
        chunked=lane.chunked and _takes(lane, "prefill"),
    )
