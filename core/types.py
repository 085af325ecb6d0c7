"""The data that travels through the engine. Nothing here imports torch or knows a device.

`Request` and `SequenceUpdate` cross a process boundary, so they are msgspec structs as sampling parameters are;
`StepPlan`, `Batch` and `StepResult` stay inside one process and hold numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

# The documented place of these two.
from octavo.core.params import RequestOutputKind as RequestOutputKind
from octavo.core.params import SamplingParams as SamplingParams
from octavo.core.pooling import Pooling

BatchKind = Literal["prefill", "decode", "mixed"]
FinishReason = Literal["stop", "length", "abort", "error"]
MissReason = Literal[
    "diverged", "evicted", "salted", "below_block", "prompt_logprobs", "pooling", "off"
]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

"""What beams have no use for, and the values that ask for nothing."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt on its way to the engine.

    `id` is unique inside the process and never a client's own id. `eos_token_ids` is the model's
    whole list.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0  # time.time() at the door
    priority: int = 0  # lower runs first
    cache_salt: str | None = None
    adapter: str | None = None
    image_hashes: tuple[bytes, ...] = ()
    shown_special: tuple[int, ...] = ()  # of beams with stop strings: special tokens that are text
    pooling: Pooling | None = None  # the prompt is embedded, and nothing is drawn: max_tokens is 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, from the raw logits (before penalties and temperature).

    The chosen token comes first, then the `k` most likely in falling order (the chosen one may
    stand there again). Values are natural logs; `rank` is 1 for the most likely token.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Timings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where a request's time went. Times are `time.monotonic()` seconds unless named otherwise."""

    arrival_time: float = 0.0  # time.time()
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0  # of the preemptions, those that kept their blocks in host memory
    num_recomputed_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of those drafted
    # Of several samples or beams, known at their end: the most KV blocks that they held at once, and how
    # many they would have held without sharing. 0 where there was never more than one at a time.
    peak_blocks: int = 0
    peak_logical_blocks: int = 0
    cache_miss: MissReason | None = None  # why the prompt behind its cached tokens was computed

    @property
    def queue_time(self) -> float:
        """Seconds from arrival in the engine to the first step that ran it."""
        return max(0.0, self.scheduled - self.queued)

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival in the engine to the first token."""
        return max(0.0, self.first_token - self.queued)

    @property
    def inference_time(self) -> float:
        """Seconds from the first step to the last token."""
        return max(0.0, self.last_token - self.scheduled)

    @property
    def prefill_time(self) -> float:
        """Seconds from the first step to the first token."""
        return max(0.0, self.first_token - self.scheduled)

    @property
    def decode_time(self) -> float:
        """Seconds from the first token to the last."""
        return max(0.0, self.last_token - self.first_token)


class SequenceUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one step brought to one sample of a request: the engine's only output.

    `stop_reason` is the token id that stopped it (None for EOS), or a message when the finish
    reason is "error".
    """

    request_id: str
    index: int
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = (
        None  # whole prompt but its first token; sent once
    )
    num_cached_tokens: int = 0
    timings: Timings | None = None  # with a sample's first and last update, and after preemptions
    cumulative: float | None = None  # of a beam, whole: the sum of its log-probabilities
    score: float | None = None  # and what it was ranked by
    beams: int | None = None  # with a request's first update: how many there are, if fewer than n
    embedding: bytes | None = None  # of an embedded prompt, float32; once, with its end


@dataclass(frozen=True, slots=True)
class Logprob:
    """One entry of `CompletionOutput.logprobs`, as vLLM has it."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsAt = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request: its text and tokens so far (or the new ones, for DELTA)."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAt] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None  # of a beam: cumulative_logprob / length ** length_penalty

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What a caller of `LLM.generate` or `AsyncLLM.generate` receives for one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobsAt | None] | None = None
    num_cached_tokens: int = 0
    metrics: Timings | None = None
    embedding: bytes | None = None  # little-endian float32, of an embedded prompt


# ---------------------------------------------------------------------------------- one step


class ScheduledTokens(msgspec.Struct, frozen=True, gc=False):
    """`count` tokens of one sequence, from position `start` on.

    `samples` rows of the last token's logits are drawn from: 0 while a prompt is unfinished, n when
    a prompt with n samples is done. `all_logits` also asks for every row's logits (prompt logprobs).
    The last `drafts` tokens are guesses: then each of the item's tokens is drawn behind, once.
    """

    sequence: Any  # core.sequence.Sequence
    start: int
    count: int
    samples: int
    all_logits: bool = False
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Who runs this step. `copies` (source block, destination block) run before anything is written;
    every destination stands in it once. In front of them `swap_out` (block, host slot) is carried out, and
    behind them `swap_in` (host slot, block); what is copied to stands in each once.

    All items are of `lane`, unless several lanes share the step: then `lanes` has each lane's index
    and how many of `items` are its own, in order.
    """

    step: int
    items: tuple[ScheduledTokens, ...]
    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[str, ...] = ()
    lane: int = 0
    lanes: tuple[tuple[int, int], ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([item.count for item in self.items])

    @property
    def parts(self) -> tuple[StepPlan, ...]:
        """The plan cut by lanes, without copies: a batch each."""
        if not self.lanes:
            return (self,)
        found = []
        start = 0
        for lane, count in self.lanes:
            found.append(StepPlan(self.step, self.items[start : start + count], lane=lane))
            start += count
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Batch:
    """One lane of a step as plain host arrays, padded to the lane's bucket.

    T tokens, S sequences and L rows of logits, all padded. Per KV group g: `slots[g]` [T] int64,
    `block_tables[g]` [S, blocks] int32 (0, the null block, where unused). A slot of -1 is padding.

    The arrays are views of buffers that are used again: they hold until the step is done, and while
    the next one is built, but not longer. Whoever keeps something copies it.
    """

    num_tokens: int  # without padding
    num_seqs: int  # without padding
    token_ids: Int32  # [T]
    positions: Int64  # [T]
    query_start: Int32  # [S + 1], padded with its last value
    context_lens: Int32  # [S], tokens in the KV cache once this step is written; 0 for padding
    logits_rows: Int32  # [L], rows of T; a row may stand there more than once; padded with row 0
    slots: tuple[Int64, ...]  # per KV group [T]: block · block size + offset; -1: padding
    block_tables: tuple[Int32, ...]  # per KV group [S, blocks]; 0: unused
    token_src: Int32 | None = None  # [T]; i >= 0: the token is row i of the step before
    max_query_len: int = 0  # the most tokens of one sequence
    max_context_len: int = 0  # the largest of context_lens
    lane: int = 0  # index in `ExecutionPlan.lanes`
    # The lane's kind where it has one. In a mixed lane: "decode" when every item is one token that is
    # drawn from once, "prefill" when none is.
    kind: BatchKind = "mixed"
    num_rows: int = 0  # L without padding


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The most likely next tokens of a beam, in falling order of log-probability. `entries`: the same as
    the request's log-probabilities tell it, if it asks for them."""

    tokens: list[int]
    logprobs: list[float]
    entries: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's tokens on the host.

    `tokens` [L] int64 follow the plan's samples in order; -1 means that no token was allowed or the
    logits were not finite. `logprobs[i]` belongs to `tokens[i]`; `prompt_logprobs[request id]` are
    the entries this step computed, in order.
    """

    tokens: Int64
    logprobs: Sequence[TokenLogprobs | None] = ()
    prompt_logprobs: Mapping[str, list[TokenLogprobs]] = field(default_factory=dict)
    candidates: Mapping[int, BeamCandidates] = field(default_factory=dict)  # by place in `tokens`
    # Request id -> float32 numbers of prompts that were embedded; none where they were not finite.
    pooled: Mapping[str, bytes] = field(default_factory=dict)
