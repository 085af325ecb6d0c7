"""Token ids -> text, piece by piece, never half a character."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Collection, Sequence

from octavo.core.loading.tokenizer import Tokenizer
from octavo.core.params import SamplingParams

_REPLACEMENT = "\ufffd"
_PROMPT_TAIL = 8
"""Prompt tokens that a detokeniser sees, so that a character begun there is finished."""


class Detokenizer:
    """Turns one sequence's tokens into text as they come.

    The pieces that ``push`` and ``flush`` return, joined, are ``tokenizer.decode`` of all ids pushed.

    prompt_ids_tail: the last ids of the prompt, when the output continues the prompt's text rather
    than stands alone: a character begun there is finished here, and a sentencepiece output keeps
    the space it begins with. A handful of ids is enough.
    spaces_between_special_tokens: as in ``Tokenizer.decode``, without effect.
    shown_special: special tokens that are text even with skip_special_tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids_tail: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown_special: Collection[int] = (),
    ) -> None:
        self._way: _ByteWay | _GenericWay
        kind = _GenericWay if tokenizer.decoder_kind == "generic" else _ByteWay
        skipped = tokenizer.special_ids.difference(shown_special)
        self._way = kind(
            tokenizer, prompt_ids_tail, skipped if skip_special_tokens else frozenset()
        )

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        shown_special: Collection[int] = (),
    ) -> Detokenizer:
        """For the output of a request."""
        return cls(
            tokenizer,
            prompt_ids_tail=prompt_ids[-_PROMPT_TAIL:],
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            shown_special=shown_special,
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these further ids; may be empty."""
        return self._way.push(token_ids)

    def fork(self) -> Detokenizer:
        """One that has come as far as this one, and goes its own way."""
        other = copy.copy(self)
        other._way = self._way.fork()
        return other

    def flush(self) -> str:
        """What was held back, at the end; an unfinished character becomes U+FFFD."""
        return self._way.flush()


class _ByteWay:
    """For decoders whose text is the tokens' bytes in a row: constant work per token."""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skip: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = self._decoder.decode
        self._strip = tokenizer.strips_leading_space and not tail
        self._decode(b"".join([self._token_bytes(i) for i in tail if i not in self._skip]))

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:  # one token a step is the common case
            token_id = token_ids[0]
            if token_id in self._skip:
                return ""
            text = self._decode(self._token_bytes(token_id))
        else:
            skip, token_bytes = self._skip, self._token_bytes
            text = self._decode(b"".join([token_bytes(i) for i in token_ids if i not in skip]))
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decode(b"", True)

    def fork(self) -> _ByteWay:
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        other._decode = other._decoder.decode
        return other


class _GenericWay:
    """For any other decoder: decode a short window again, and give what it adds.

    The window begins where text was last certain, so that what a decoder does at the beginning of a
    text (dropping a space, joining word pieces) cancels out.
    """

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._ids = list(tail)
        self._first = len(tail)  # where the output begins
        self._prefix, self._read = 0, len(tail)
        self._given: list[str] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        before = self._text(self._prefix, self._read)
        after = self._text(self._prefix, len(self._ids))
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        delta = after[len(before) :]
        self._given.append(delta)
        return delta

    def flush(self) -> str:
        given = "".join(self._given)
        whole = self._text(0, len(self._ids))[len(self._text(0, self._first)) :]
        rest = whole[len(given) :] if whole.startswith(given) else ""
        self._given.append(rest)
        return rest

    def fork(self) -> _GenericWay:
        other = copy.copy(self)
        other._ids, other._given = list(self._ids), list(self._given)
        return other

    def _text(self, start: int, end: int) -> str:
        ids = [i for i in self._ids[start:end] if i not in self._skip]
        return self._tokenizer.decode(ids, skip_special_tokens=False)
