"""How many KV blocks a request's sequences hold, and how many they would hold if none were shared."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from octavo.core.sequence import Sequence
from octavo.core.types import Timings


def held(sequences: Iterable[Sequence]) -> tuple[int, int]:
    """(physical, logical) blocks: how many different ones the tables name, and how many with repeats."""
    tables = [sequence.blocks for sequence in sequences]
    distinct: set[int] = set()
    return len(distinct.union(*tables)), sum(map(len, tables))


@dataclass(slots=True)
class Peak:
    """The most blocks that a group of sequences held at once, by either count of `held`."""

    physical: int = 0
    logical: int = 0
    _seen: list[tuple[int, int]] = field(default_factory=list)

    def note(self, sequences: Collection[Sequence]) -> None:
        """Looks at a group. Of one sequence alone nothing is noted: there is nobody to share with."""
        if len(sequences) < 2:
            return
        # Tables change in few steps: a block holds many tokens.
        state = [(sequence.table_id, sequence.num_blocks) for sequence in sequences]
        if state == self._seen:
            return
        self._seen = state
        physical, logical = held(sequences)
        self.physical = max(self.physical, physical)
        self.logical = max(self.logical, logical)

    def tell(self, timings: Timings) -> None:
        """Writes it down for the request's caller."""
        timings.peak_blocks, timings.peak_logical_blocks = self.physical, self.logical
