"""What the chip knows of itself. It lives on the host's processor, so this imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

BLOCK = 128
"""Tokens in a KV block."""

CHUNK = 16
"""A part of a prompt that is not its last has a multiple of so many tokens."""

RESTS = 2
"""Steps for which a block that was read may still be read by the device."""

POLLS = 3
"""How often a copy to the host answers that it is not done."""

PROMPT_TOKENS = (32, 256, 1024)
PROMPT_SEQS = (4,)
PROMPT_ROWS = (4, 64)
DECODE = (4, 16, 64)
"""Sequences that decode: as many tokens, and as many rows of logits."""
BLOCKS = (2, 8, 32, 128, 512)
"""Widths of block tables."""

ROWS = frozenset(PROMPT_TOKENS + PROMPT_ROWS + DECODE)
"""How many rows an operation may be given."""


class StrictError(RuntimeError):
    """The chip was asked for what it does not do."""


class ShapeError(StrictError):
    """A shape that is none of the chip's buckets."""


class BoundsError(StrictError):
    """An index that points outside of what it indexes."""


class DonatedError(StrictError):
    """A KV handle was used after it had been given to an operation."""


class RestError(StrictError):
    """A block was written while the device may still read it."""


class RecompileError(StrictError):
    """A step had a shape for which no program was compiled at the start."""


class HostError(StrictError):
    """Something else than a compiled program touched what is on the device."""


class InjectedError(StrictError):
    """The failure that `Chip.fail_after` asked for."""


class Chip:
    """The one chip of this process.

    Attributes:
        step: the batch that was uploaded last.
        quiet: up to which step nothing is read any more (`Ops.drain`).
        counts: how often each operation ran; "compilations" are programs that were built.
    """

    def __init__(self) -> None:
        self.step = 0
        self.quiet = 0
        self.counts: Counter[str] = Counter()
        self._fail_at: int | None = None

    def fail_after(self, writes: int | None) -> None:
        """Lets the write to the KV cache after `writes` further ones fail, and take its handle with it."""
        self._fail_at = None if writes is None else self.counts["write_kv"] + writes + 1

    def may_fail(self) -> None:
        """Raises InjectedError if it was asked for now."""
        if self._fail_at is not None and self.counts["write_kv"] >= self._fail_at:
            self._fail_at = None
            raise InjectedError("the chip fell over in the middle of a step, as it was asked to")


CHIP = Chip()


def cut(buckets: Sequence[int], wanted: int) -> tuple[int, ...]:
    """The buckets up to the first that holds `wanted`; all of them if none does."""
    return tuple(b for i, b in enumerate(buckets) if i == 0 or buckets[i - 1] < wanted)


def check_rows(rows: int, what: str) -> None:
    """Raises ShapeError unless the chip has programs for so many rows."""
    if rows not in ROWS:
        raise ShapeError(f"{what} of {rows} rows; this chip has {sorted(ROWS)}")
