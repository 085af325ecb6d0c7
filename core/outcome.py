"""What a token means for its sequence, and what is told of it."""

from __future__ import annotations

from octavo.core.sequence import Sequence
from octavo.core.types import FinishReason, SequenceUpdate, Timings, TokenLogprobs


def stop_reason(sequence: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
    """Whether the token just appended ends the sequence, and by which stop token (None for EOS)."""
    request, params = sequence.request, sequence.request.params
    # Where a grammar is followed, an end that comes early could not be kept out: nothing else might follow.
    if sequence.num_output >= params.min_tokens or params.structured_outputs is not None:
        if not params.ignore_eos and token in request.eos_token_ids:
            return "stop", None
        if params.stop_token_ids and token in params.stop_token_ids:
            return "stop", token
    if sequence.num_tokens >= sequence.max_len:
        return "length", None
    return None, None


def sequence_update(
    sequence: Sequence,
    tokens: list[int],
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
    timings: Timings | None = None,
    reason: FinishReason | None = None,
    stop: int | str | None = None,
    index: int | None = None,
) -> SequenceUpdate:
    """What is told of `sequence`, or of its sample `index` while it stands for several."""
    return SequenceUpdate(
        request_id=sequence.request.id,
        index=sequence.index if index is None else index,
        token_ids=tokens,
        finish_reason=reason,
        stop_reason=stop,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=sequence.num_cached,
        timings=timings,
    )
