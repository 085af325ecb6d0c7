"""What the answers of chat and completions have in common: ids, usage, chunks, finish reasons."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from octavo.core.entry.server.errors import ApiError
from octavo.core.entry.server.http import Call
from octavo.core.params import SamplingParams
from octavo.core.types import CompletionOutput, MissReason, RequestOutput

_encode = msgspec.json.Encoder().encode


class Usage:
    """Tokens of one HTTP request, over its prompts and samples. The call learns of them too."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._prompts: dict[int, tuple[int, int]] = {}
        self._misses: dict[int, MissReason] = {}
        self._completion = 0
        self.reasoning: dict[int, int] | None = None
        """Tokens of each sample's reasoning, where reasoning is told apart."""

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Counts an output's new tokens (DELTA or FINAL_ONLY)."""
        cached = output.num_cached_tokens
        length = len(output.prompt_token_ids)
        call = self._call
        if prompt_index not in self._prompts:
            call.prompt_tokens = (call.prompt_tokens or 0) + length
        self._prompts[prompt_index] = (length, cached)
        if (times := output.metrics) is not None and times.cache_miss is not None:
            self._misses[prompt_index] = times.cache_miss
        self._completion += sum(len(sample.token_ids) for sample in output.outputs)
        call.output_tokens = self._completion

    def json(self) -> dict[str, Any]:
        """The API's `usage`."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        details: dict[str, Any] = {}
        if self.reasoning is not None:
            spent = sum(self.reasoning.values())
            details["completion_tokens_details"] = {"reasoning_tokens": spent}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values()),
                "cache_misses": [
                    {
                        "prompt": index,
                        "reason": reason,
                        "at_token": cached,
                        "tokens": tokens - cached,
                    }
                    for index, reason in sorted(self._misses.items())
                    for tokens, cached in (self._prompts[index],)
                ],
            },
            **details,
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
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None,
        has_usage: bool,
        **extra: Any,
    ) -> bytes:
        """One server-sent event. `has_usage`: the client asked for it, so null where there is none."""
        tail = b',"usage":' + _encode(usage) if has_usage else b""
        for name, value in extra.items():
            tail += b',"' + name.encode() + b'":' + _encode(value)
        return self._head + _encode(choices) + tail + b"}\n\n"

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], **extra: Any) -> bytes:
        """The answer of a request that does not stream."""
        return _encode({**self.fields, "choices": choices, "usage": usage, **extra})


class Report:
    """What `include_metrics` asks for: where the time of each prompt's request went."""

    def __init__(self, wanted: bool | None, params: SamplingParams) -> None:
        self.wanted = bool(wanted)
        self._limit = params.max_tokens
        self._tokens: dict[tuple[int, int], int] = {}
        self._stopped: dict[int, dict[int, str]] = {}
        self._last: dict[int, RequestOutput] = {}

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Takes note of an output (DELTA or FINAL_ONLY)."""
        if not self.wanted:
            return
        self._last[prompt_index] = output
        for sample in output.outputs:
            key = (prompt_index, sample.index)
            self._tokens[key] = self._tokens.get(key, 0) + len(sample.token_ids)
            if sample.finish_reason is not None:
                stopped = self._stopped.setdefault(prompt_index, {})
                stopped[sample.index] = self._why(sample, self._tokens[key])

    def _why(self, sample: CompletionOutput, tokens: int) -> str:
        if sample.finish_reason == "length":
            return "max_tokens" if self._limit == tokens else "context_length"
        if sample.finish_reason != "stop":
            return str(sample.finish_reason)
        if sample.stop_reason is None:
            return "eos"
        return "stop_string" if isinstance(sample.stop_reason, str) else "stop_token"

    def fields(self) -> dict[str, Any]:
        """`metrics`, when wanted: an object, or for several prompts a list of them."""
        if not self.wanted:
            return {}
        reports = [self._one(index) for index in sorted(self._last)]
        return {"metrics": reports[0] if len(reports) == 1 else reports}

    def _one(self, index: int) -> dict[str, Any]:
        output = self._last[index]
        stopped = self._stopped.get(index, {})
        report: dict[str, Any] = {"stopped_by": [stopped[i] for i in sorted(stopped)]}
        if (times := output.metrics) is not None:
            report |= {
                "queued_seconds": times.queue_time,
                "prefill_seconds": times.prefill_time,
                "time_to_first_token_seconds": times.time_to_first_token,
                "decode_seconds": times.decode_time,
                "total_seconds": max(0.0, times.finished - times.queued),
                "cached_tokens": output.num_cached_tokens,
                "recomputed_tokens": times.num_recomputed_tokens,
                "preemptions": times.num_preemptions,
                "swaps": times.num_swaps,
                "drafted_tokens": times.num_drafted_tokens,
                "accepted_tokens": times.num_accepted_tokens,
            }
            if times.peak_logical_blocks:
                report["peak_blocks"] = times.peak_blocks
                report["peak_logical_blocks"] = times.peak_logical_blocks
        return report


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
