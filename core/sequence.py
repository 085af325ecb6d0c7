"""A sequence: the one mutable record of a sample's tokens, its KV blocks and how far they are computed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from octavo.core.blocks import BlockHash
from octavo.core.types import Int32, Request, Timings, TokenLogprobs

_GOLDEN = 0x9E3779B97F4A7C15
_next_table_id = itertools.count(1).__next__


class Sequence:
    """One sample of a request.

    `tokens[:num_tokens]` are prompt and output; the KV cache holds the first `num_computed` of them.
    `max_len` is where it must end. Until its prompt is done a sequence also stands for the
    `pending_samples - 1` siblings that will be forked from it.

    `block_table[:num_blocks]` are its KV blocks. While `table_id` stays the same, blocks were only
    appended to it, so a copy made earlier is still a prefix; no two tables ever had the same id. A
    single token at a position below `writable` may be written as it is: its block is there and no
    one else's.
    """

    __slots__ = (
        "beams",
        "block_table",
        "computes_all",
        "draft_hope",
        "draft_state",
        "draw_state",
        "ends",
        "hashes",
        "held",
        "index",
        "last_token",
        "max_len",
        "may_draft",
        "num_blocks",
        "num_cached",
        "num_computed",
        "num_promised",
        "num_prompt",
        "num_remembered",
        "num_tokens",
        "order",
        "parked_for",
        "pending_samples",
        "preemptions",
        "preemptions_told",
        "prefix_waits",
        "prompt_logprobs",
        "queued",
        "request",
        "root",
        "running",
        "seed",
        "swapped",
        "table_id",
        "timings",
        "tokens",
        "writable",
    )

    def __init__(
        self,
        request: Request,
        order: int,
        root: BlockHash,
        seed: int,
        max_len: int,
    ) -> None:
        prompt, params = request.prompt_token_ids, request.params
        self.request = request
        self.index = 0
        self.order = order
        self.root = root
        self.seed = seed
        self.max_len = max_len
        self.tokens: Int32 = np.array(prompt, np.int32)  # grows by doubling
        self.last_token = int(prompt[-1])
        self.num_prompt = self.num_tokens = len(prompt)
        self.num_computed = 0
        self.block_table: Int32 = np.zeros(0, np.int32)  # grows by doubling
        self.num_blocks = 0
        self.table_id = _next_table_id()
        self.writable = 0
        self.hashes: list[BlockHash] = []
        self.num_remembered = 0  # full blocks whose hash the block manager has
        self.num_promised = 0  # full blocks that others may wait for, the remembered included
        self.num_cached = 0
        self.pending_samples = params.width
        self.beams: Any = None  # the `BeamGroup` it is part of
        self.swapped: Any = None  # while it waits: the `Swapped` blocks that it had
        # Tokens that may end it; `min_tokens` may still speak against.
        self.ends = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            self.ends |= frozenset(request.eos_token_ids)
        self.preemptions = 0
        self.preemptions_told = 0  # when the timings were last sent
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.running = False
        self.queued = False
        self.held = False  # neither queued nor parked: what it needs is not ready
        self.parked_for: BlockHash | None = None  # the block it waits for while parked
        self.prefix_waits = 0
        self.timings = Timings(arrival_time=request.arrival_time, queued=time.monotonic())
        self.draw_state: Any = None  # the sampler's or the pooler's, made when first needed
        # Whether no block may come from the prefix cache: hidden states of all positions are wanted.
        self.computes_all = request.pooling is not None and request.pooling.kind != "last"
        self.may_draft = not (
            params.bad_words
            or params.use_beam_search
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
        )
        self.draft_state: Any = None  # the drafter's
        self.draft_hope = -1.0  # how likely a drafted token is right; below 0: none was tried

    @property
    def key(self) -> tuple[int, int, int]:
        """Order of service: priority (lower first), then arrival, then sample."""
        return (self.request.priority, self.order, self.index)

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def prompt_logprobs_done(self) -> int:
        """Prompt positions whose next token's log-probability is known."""
        return len(self.prompt_logprobs) if self.prompt_logprobs is not None else 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are still to be computed: then every row's logits are
        needed and no block may come from the prefix cache."""
        if self.request.params.prompt_logprobs is None:
            return False
        return self.prompt_logprobs is None or self.prompt_logprobs_done < self.num_prompt - 1

    @property
    def decoding(self) -> bool:
        """Whether one token is all that is left to compute."""
        return self.num_tokens - self.num_computed == 1

    @property
    def blocks(self) -> list[int]:
        blocks: list[int] = self.block_table[: self.num_blocks].tolist()
        return blocks

    def sample_seed(self, sample: int) -> int:
        """The seed of the sibling `sample` places after this one, as `fork` will set it."""
        return (self.seed + sample * _GOLDEN) & (2**64 - 1)

    def append(self, token: int) -> None:
        if self.num_tokens == len(self.tokens):
            self.tokens = _grown(self.tokens, self.num_tokens + 1)
        self.tokens[self.num_tokens] = self.last_token = token
        self.num_tokens += 1

    def set_drafts(self, drafts: SequenceOf[int]) -> None:
        """Writes guesses behind the tokens, where the next ones will stand."""
        end = self.num_tokens + len(drafts)
        if end > len(self.tokens):
            self.tokens = _grown(self.tokens, end)
        self.tokens[self.num_tokens : end] = drafts

    def add_blocks(self, blocks: SequenceOf[int]) -> None:
        end = self.num_blocks + len(blocks)
        if end > len(self.block_table):
            self.block_table = _grown(self.block_table, end)
        self.block_table[self.num_blocks : end] = blocks
        self.num_blocks = end

    def replace_block(self, place: int, block: int) -> None:
        """Puts another block in the place of one."""
        self.block_table[place] = block
        self.table_id = _next_table_id()

    def drop_blocks(self) -> None:
        """Empties the block table (whose ref counts the caller lowers)."""
        self.num_blocks = self.writable = 0
        self.table_id = _next_table_id()

    def fork(self, index: int, num_blocks: int) -> Sequence:
        """A sibling with the same tokens and first blocks (whose ref counts the caller raises)."""
        child = Sequence.__new__(Sequence)
        for name in Sequence.__slots__:
            setattr(child, name, getattr(self, name))
        child.index = index
        child.seed = self.sample_seed(index - self.index)
        child.tokens = self.tokens.copy()
        child.block_table = self.block_table[:num_blocks].copy()
        child.num_blocks = num_blocks
        child.table_id = _next_table_id()
        child.writable = self.writable = 0  # the last block may be shared now
        child.preemptions = child.preemptions_told = 0
        child.hashes = list(self.hashes)
        child.timings = Timings(
            arrival_time=self.timings.arrival_time,
            queued=self.timings.queued,
            scheduled=self.timings.scheduled,
            num_cached_tokens=self.timings.num_cached_tokens,
            cache_miss=self.timings.cache_miss,
        )
        child.pending_samples = 1
        child.draw_state = child.draft_state = None
        return child


class Ahead:
    """A sequence as it will be if the first `drafts` of its drafts are right; what the sampler asks of it."""

    __slots__ = (
        "draft",
        "num_output",
        "num_prompt",
        "num_tokens",
        "request",
        "sequence",
        "tokens",
    )

    def __init__(self, sequence: Sequence, drafts: int) -> None:
        self.sequence = sequence
        self.request, self.tokens = sequence.request, sequence.tokens
        self.num_prompt = sequence.num_prompt
        self.num_tokens = sequence.num_tokens + drafts
        self.num_output = self.num_tokens - self.num_prompt
        self.draft = int(self.tokens[self.num_tokens - 1])


def _grown(array: Int32, size: int) -> Int32:
    bigger = np.zeros(max(size, 2 * len(array), 32), np.int32)
    bigger[: len(array)] = array
    return bigger
