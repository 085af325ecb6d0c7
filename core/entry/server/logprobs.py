"""Logprobs in the two shapes of the OpenAI API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from octavo.core.entry.server.errors import ApiError
from octavo.core.loading.tokenizer import Tokenizer
from octavo.core.types import LogprobsAt

FLOOR = -9999.0
"""What stands for minus infinity, which JSON does not have; OpenAI's practice."""


def number(logprob: float) -> float:
    """A logprob that JSON can hold.

    Raises:
        ApiError: a 500 for NaN.
    """
    if math.isnan(logprob):
        raise ApiError(500, "the model's logits are not numbers (NaN)", code="nan_logits")
    return max(logprob, FLOOR)


class TokenNames:
    """Tokens as the API spells them: text; `bytes:\\xe2\\x80` for a token that is only part of a
    character; `token_id:5` when asked for (return_tokens_as_token_ids)."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """The token's spelling."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def raw(self, token_id: int) -> bytes:
        """The token's bytes."""
        return self._tokenizer.token_bytes(token_id)


def chat_logprobs(entries: Sequence[LogprobsAt], top: int, names: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer; `top` (-1: all) alternatives for each token."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": names.name(token),
            "logprob": number(logprob),
            "bytes": list(names.raw(token)),
        }

    content = []
    for entry in entries:
        chosen = next(iter(entry))
        ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
        kept = ranked if top < 0 else [item for item in ranked if (item[1].rank or 0) <= top][:top]
        content.append(
            {
                **one(chosen, entry[chosen].logprob),
                "top_logprobs": [one(token, value.logprob) for token, value in kept],
            }
        )
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, built as tokens come; keeps the offset into the text."""

    def __init__(self, names: TokenNames, top: int, special_ids: frozenset[int]) -> None:
        self._names = names
        self._top = top
        self._special = special_ids
        self._offset = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def render(
        self, ids: Sequence[int], entries: Sequence[LogprobsAt | None]
    ) -> dict[str, list[Any]]:
        """These tokens; an entry is None for a prompt's first."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, entry in zip(ids, entries, strict=True):
            tokens.append(self._names.name(token))
            offsets.append(self._offset)
            if token not in self._special:
                self._offset += len(self._decode(self._names.raw(token)))
            if entry is None:
                logprobs.append(None)
                top.append(None)
                continue
            logprobs.append(number(entry[token].logprob))
            kept = entry.items() if self._top else ()
            top.append({self._names.name(t): number(value.logprob) for t, value in kept})
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top,
            "text_offset": offsets,
        }


def prompt_logprobs_json(entries: Sequence[LogprobsAt | None] | None) -> list[Any] | None:
    """vLLM's `prompt_logprobs`: null, then {token id: {logprob, rank, decoded_token}}."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": number(value.logprob),
                "rank": value.rank,
                "decoded_token": value.decoded_token,
            }
            for token, value in entry.items()
        }
        for entry in entries
    ]
