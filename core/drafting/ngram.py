"""Prompt lookup (Saxena 2023): what followed the last time the text ended like this."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.drafting.drafter import SpeculativeConfig
from octavo.core.sequence import Sequence as Seq


class _Index:
    """Where each n-gram of a text was followed last. Grows with the text: a few dictionary entries a token,
    so a look-up does not depend on the text's length."""

    __slots__ = ("_places", "_sizes", "text")

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes  # the longest first
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in sizes]
        self.text: list[int] = []

    def extend(self, tokens: list[int]) -> None:
        text = self.text
        first = len(text)
        text.extend(tokens)
        for size, places in zip(self._sizes, self._places, strict=True):
            for at in range(max(first, size), len(text)):
                places[tuple(text[at - size : at])] = at

    def follow(self, count: int) -> list[int]:
        """What followed the longest known end of the text, `count` tokens; repeated where the text ends
        first. Empty when its end is new."""
        text = self.text
        for size, places in zip(self._sizes, self._places, strict=True):
            at = places.get(tuple(text[-size:]))
            if at is not None:
                found = text[at : at + count]
                period = len(found)
                while len(found) < count:
                    found.append(found[-period])
                return found
        return []


class NgramDrafter:
    """Drafts what followed the latest earlier place that ends in the same tokens, in prompt or output. Of
    all lengths of the match from `prompt_lookup_max` down to `prompt_lookup_min` the longest counts."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)

    def propose(self, sequences: Sequence[Seq], counts: Sequence[int]) -> list[list[int]]:
        return [self._one(s, n) for s, n in zip(sequences, counts, strict=True)]

    def _one(self, sequence: Seq, count: int) -> list[int]:
        index = sequence.draft_state
        if index is None:
            index = sequence.draft_state = _Index(self._sizes)
        known = len(index.text)
        if known < sequence.num_tokens:
            index.extend(sequence.tokens[known : sequence.num_tokens].tolist())
        found: list[int] = index.follow(count)
        return found
