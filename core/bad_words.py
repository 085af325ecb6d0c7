"""Keeps words out of the text, whatever tokens would spell them.

A word's bytes can be completed by one token in two ways: the token contains the whole word, or the
text so far ends with a proper prefix of the word and the token starts with the rest. Both sets are
found in a sorted table of the vocabulary's bytes, so a step looks up a few ranges and never scans.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from octavo.core.types import Int64


class VocabularyIndex:
    """The vocabulary's bytes [V], searchable by prefix and by content."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = list(token_bytes)

    @cached_property
    def _sorted(self) -> tuple[list[bytes], Int64]:
        order = sorted(range(len(self.token_bytes)), key=self.token_bytes.__getitem__)
        return [self.token_bytes[i] for i in order], np.array(order, np.int64)

    def starting_with(self, prefix: bytes) -> Int64:
        """Ids of the tokens whose bytes start with `prefix`."""
        words, order = self._sorted
        low = bisect_left(words, prefix)
        high = bisect_left(words, _after(prefix)) if _after(prefix) else len(words)
        return order[low:high]

    def containing(self, word: bytes) -> Int64:
        """Ids of the tokens whose bytes contain `word`."""
        return np.array([i for i, b in enumerate(self.token_bytes) if word in b], np.int64)


def _after(prefix: bytes) -> bytes:
    """The smallest byte string greater than all that start with `prefix`; empty when there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b""


_LONGEST_CHARACTER = 4


class BadWords:
    """One sequence's banned words and the end of its text.

    prompt: the prompt's ids. A character begun there and finished in the output is the output's.
    """

    def __init__(
        self, words: Sequence[bytes], index: VocabularyIndex, prompt: Sequence[int] = ()
    ) -> None:
        self._index = index
        self._words = list(words)
        self._always = np.unique(np.concatenate([index.containing(w) for w in words]))
        self._rest: dict[bytes, Int64] = {}
        self._keep = max(len(w) for w in words) - 1
        before = b"".join(index.token_bytes[i] for i in prompt[-_LONGEST_CHARACTER:])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(before)
        self._tail = decoder.getstate()[0][-self._keep :] if self._keep else b""
        self._seen = 0

    def advance(self, output: Sequence[int]) -> None:
        """Takes the output tokens from the last one seen on."""
        for token in output[self._seen :]:
            self._tail = (
                (self._tail + self._index.token_bytes[token])[-self._keep :] if self._keep else b""
            )
        self._seen = len(output)

    def banned(self) -> Int64:
        """Ids of the tokens that would complete a word now."""
        parts = [self._always]
        for word in self._words:
            for held in range(1, min(len(word), len(self._tail) + 1)):
                if self._tail.endswith(word[:held]):
                    rest = word[held:]
                    if rest not in self._rest:
                        self._rest[rest] = self._index.starting_with(rest)
                    parts.append(self._rest[rest])
        return np.concatenate(parts)
