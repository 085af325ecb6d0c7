"""What the answers of chat and completions have in common: ids, usage, chunks, finish reasons."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from octavo.core.entry.server.errors import ApiError
from octavo.core.types import CompletionOutput, RequestOutput

_encode = msgspec.json.Encoder().encode


class Usage:
    """Tokens of one HTTP request, over its prompts and samples."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Counts an output's new tokens (DELTA or FINAL_ONLY)."""
        cached = output.num_cached_tokens
        self._prompts[prompt_index] = (len(output.prompt_token_ids), cached)
        self._completion += sum(len(sample.token_ids) for sample in output.outputs)

    def json(self) -> dict[str, Any]:
        """The API's `usage`."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values())
            },
        }


class Envelope:
    """The fields that all chunks, or the one answer, share: id, object, created, model."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self.fields = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        # A chunk is spliced from bytes: the shared fields are encoded once a request.
        self._head = b"data: " + _encode(self.fields)[:-1] + b',"choices":'

    def chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, has_usage: bool
    ) -> bytes:
        """One server-sent event. `has_usage`: the client asked for it, so null where there is none."""
        tail = b',"usage":' + _encode(usage) if has_usage else b""
        return self._head + _encode(choices) + tail + b"}\n\n"

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], **extra: Any) -> bytes:
        """The answer of a request that does not stream."""
        return _encode({**self.fields, "choices": choices, "usage": usage, **extra})


DONE = b"data: [DONE]\n\n"


def finish_fields(sample: CompletionOutput) -> dict[str, Any]:
    """finish_reason, and vLLM's stop_reason beside it.

    Raises:
        ApiError: a 500 when the sample ended by an error.
    """
    if sample.finish_reason == "error":
        raise ApiError(500, f"generation failed: {sample.stop_reason}", code="generation_failed")
    fields: dict[str, Any] = {"finish_reason": sample.finish_reason}
    if sample.finish_reason is not None:
        fields["stop_reason"] = sample.stop_reason
    return fields
