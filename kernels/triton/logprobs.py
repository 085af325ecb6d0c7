"""Log-probabilities and ranks of chosen tokens, from raw logits, in one pass over parts of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.runtime import launch
from octavo.kernels.triton.sampling import PART, partials, vocabulary_tile, vocabulary_variant
from octavo.kernels.triton.variants import Variant

if TYPE_CHECKING:
    import torch


@triton.jit
def logprob_kernel(
    logits, ids, most, mass, larger, vocab, stride, PART: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, part): the part's largest logit, the sum of exp(logit - it), and how many logits
    are larger than the chosen one."""
    row, part = tl.program_id(0), tl.program_id(1)
    start = logits + row.to(tl.int64) * stride
    chosen = tl.load(start + tl.load(ids + row)).to(tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    end = tl.minimum((part + 1) * PART, vocab)
    for first in range(part * PART, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < end, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, x)
        count += (x > chosen).to(tl.int32)
    largest = tl.max(top, 0)
    shift = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(part * PART, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < end, other=float("-inf")).to(tl.float32)
        total += tl.exp(x - shift)
    out = row * tl.num_programs(1) + part
    tl.store(most + out, largest)
    tl.store(mass + out, tl.sum(total, 0))
    tl.store(larger + out, tl.sum(count, 0))


@triton.jit
def logprob_sum_kernel(
    logits, ids, most, mass, larger, logprob, rank, norm, stride, parts, PARTS: tl.constexpr
):
    """Program (row): its log-sum-exp, and the chosen token's log-probability and rank."""
    row = tl.program_id(0)
    lane = tl.arange(0, PARTS)
    live = lane < parts
    at = row * parts + lane
    top = tl.load(most + at, mask=live, other=float("-inf"))
    largest = tl.max(top, 0)
    shift = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    own = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    scaled = tl.load(mass + at, mask=live, other=0.0)
    # A part without finite logits has a mass of 0 or infinity, which no factor may turn into NaN.
    scaled = tl.where(tl.abs(top) < float("inf"), scaled * tl.exp(own - shift), scaled)
    total = tl.log(tl.sum(scaled, 0)) + shift
    chosen = tl.load(logits + row.to(tl.int64) * stride + tl.load(ids + row)).to(tl.float32)
    tl.store(norm + row, total)
    tl.store(logprob + row, chosen - total)
    count = tl.sum(tl.load(larger + at, mask=live, other=0), 0)
    tl.store(rank + row, count.to(tl.int64) + 1)


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of logits [L, V] and ids [L] int64: each id's log-softmax [L] float32, its rank [L] int64 (1 +
    how many logits are larger), and the row's logsumexp [L] float32."""
    import torch

    count, vocab = logits.shape
    parts = triton.cdiv(vocab, PART)
    shape = vocabulary_tile(logits)
    most, larger = partials(logits, parts)
    mass = torch.empty_like(most)
    logprob, norm = (logits.new_empty(count, dtype=torch.float32) for _ in range(2))
    rank = logits.new_empty(count, dtype=torch.int64)
    stride = logits.stride(0)
    launch(
        logprob_kernel,
        (count, parts),
        *(logits, ids, most, mass, larger, vocab, stride),
        tile=shape,
        PART=PART,
        BLOCK=shape.block_n,
    )
    launch(
        logprob_sum_kernel,
        (count,),
        *(logits, ids, most, mass, larger, logprob, rank, norm, stride, parts),
        tile=shape,
        PARTS=triton.next_power_of_2(parts),
    )
    return logprob, rank, norm


AOT: list[Variant] = [
    vocabulary_variant("logprob", logprob_kernel),
    vocabulary_variant("logprob", logprob_kernel, "bfloat16"),
    vocabulary_variant("logprob_sum", logprob_sum_kernel),
]
