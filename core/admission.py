"""What may ever run here: the limits of a step, and the refusal of a request that could never fit."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.blocks import BlockManager
from octavo.core.contract_data import Lane
from octavo.core.lanes import LaneError, LaneSet
from octavo.core.params import ParamError, RequestRefused
from octavo.core.types import Request


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step and one sequence may hold. Without `lanes` there is one mixed lane, of
    `max_num_batched_tokens` in multiples of `chunk_multiple`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_logits_rows: int = 512
    chunk_multiple: int = 1
    fcfs_only: bool = False
    lanes: tuple[Lane, ...] = ()

    def __post_init__(self) -> None:
        if not self.lanes and self.max_logits_rows <= self.max_num_seqs:
            raise ValueError(
                f"max_logits_rows ({self.max_logits_rows}) must exceed max_num_seqs "
                f"({self.max_num_seqs}): each sequence may draw in the same step, and a prompt whose "
                "log-probabilities are asked for needs a row beside them"
            )

    def lane_set(self) -> LaneSet:
        """The lanes as the scheduler drives them.

        Raises:
            LaneError: they cannot be driven, or not for so many sequences.
        """
        one = Lane(
            max_seqs=self.max_num_seqs,
            max_tokens=self.max_num_batched_tokens,
            chunk_multiple=min(self.chunk_multiple, self.max_num_batched_tokens),
        )
        lanes = LaneSet(self.lanes or (one,), self.max_logits_rows)
        if lanes.max_num_seqs < self.max_num_seqs:
            raise LaneError(
                f"{self.max_num_seqs} sequences are to run, and a step of these lanes lets "
                f"{lanes.max_num_seqs} decode: {self.lanes}"
            )
        return lanes


def stored_tokens(max_len: int, prompt: int) -> int:
    """Tokens that must be in the KV cache: all but the last output token."""
    return max(prompt, max_len - 1)


def longest(request: Request, limits: SchedulerLimits, lanes: LaneSet, blocks: BlockManager) -> int:
    """Where the request's samples must end at the latest: prompt and output, in tokens.

    Raises:
        RequestRefused: it could never run here; the message has what it needs and what there is.
        ParamError: its prompt is empty, or its priority cannot be honoured.
    """
    params = request.params
    prompt = len(request.prompt_token_ids)
    if prompt == 0:
        raise ParamError("prompt", "the prompt has no tokens")
    if limits.fcfs_only and request.priority != 0:
        raise ParamError(
            "priority", "priority needs scheduling_policy='priority'; the server runs 'fcfs'"
        )
    room = limits.max_model_len - (1 if params.max_tokens != 0 else 0)
    if prompt > room:
        raise RequestRefused(
            "prompt",
            f"the prompt has {prompt} tokens; at most {room} fit, as the model's context is "
            f"{limits.max_model_len} tokens for prompt and output together",
        )
    name = "n" if params.best_of is None else "best_of"
    if params.width > limits.max_num_seqs:
        raise RequestRefused(
            name,
            f"{name}={params.width} needs {params.width} sequences at once, this engine runs {limits.max_num_seqs}",
        )
    _check_lanes(request, lanes)
    max_len = limits.max_model_len
    if params.max_tokens is not None:
        max_len = min(max_len, prompt + params.max_tokens)
    pool = blocks.usable * blocks.block_size  # the last token is never stored
    if params.max_tokens is None and prompt <= pool:
        max_len = min(max_len, pool + 1)
    if stored_tokens(max_len, prompt) > pool:
        need = blocks.blocks_for(stored_tokens(max_len, prompt))
        raise RequestRefused(
            "prompt" if prompt > pool else "max_tokens",
            f"the request needs {need} KV blocks ({prompt} prompt tokens and up to {max_len - prompt} output "
            f"tokens, {blocks.block_size} a block), the KV cache has {blocks.usable}; "
            "shorten it or start with a larger --kv-memory",
        )
    if params.use_beam_search:
        _check_beams(name, params.width, prompt, max_len, blocks, lanes)
    return max_len


def _check_beams(
    name: str, width: int, prompt: int, max_len: int, blocks: BlockManager, lanes: LaneSet
) -> None:
    """All beams run together, and share for certain only the prompt's full blocks."""
    if width > lanes.decode_tokens:
        raise RequestRefused(
            name,
            f"{width} beams draw {width} tokens in one step, this engine's hold {lanes.decode_tokens}; ask "
            "for fewer beams, or start with a larger --max-num-batched-tokens",
        )
    shared = prompt // blocks.block_size
    need = shared + width * (blocks.blocks_for(stored_tokens(max_len, prompt)) - shared)
    if need > blocks.usable:
        raise RequestRefused(
            name,
            f"{width} beams need up to {need} KV blocks together ({prompt} prompt tokens and up to "
            f"{max_len - prompt} output tokens each, {blocks.block_size} a block), the KV cache has "
            f"{blocks.usable}; ask for fewer beams or a smaller max_tokens, or start with a larger "
            "--kv-memory",
        )


def _check_lanes(request: Request, lanes: LaneSet) -> None:
    """Refuses what no batch could ever hold."""
    params, prompt = request.params, len(request.prompt_token_ids)
    whole, rows = lanes.longest_whole, lanes.prompt_rows
    if whole is not None and prompt > whole:
        raise RequestRefused(
            "prompt",
            f"the prompt has {prompt} tokens; this device computes prompts whole, of at most {whole} tokens",
        )
    if params.width > rows:
        raise RequestRefused(
            "n" if params.best_of is None else "best_of",
            f"n={params.width} draws {params.width} tokens from one prompt, this device {rows} in a step",
        )
    if params.prompt_logprobs is not None:
        need = params.width + (prompt if whole is not None else min(prompt, lanes.chunk_multiple))
        if need > rows:
            raise RequestRefused(
                "prompt_logprobs",
                f"prompt_logprobs of this prompt ({prompt} tokens, n={params.n}) needs {need} rows of "
                f"logits in one step, this device has {rows}",
            )


def mixed_seed(seed: int, order: int) -> int:
    """A seed for a request that brought none: fixed by the engine's seed and the arrival order."""
    z = (seed * 0x9E3779B97F4A7C15 + order + 1) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)
