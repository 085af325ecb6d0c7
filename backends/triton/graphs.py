"""Decode steps as captured graphs: launching a few hundred kernels one by one takes longer than they run.

A step in which every sequence has one token is padded to a bucket of sequences. For each bucket the
forward pass runs once as it is, is then captured over memory that stays where it is (`Frame`), and
afterwards only replayed: all of them at the start, when the core runs a batch without tokens. Other
steps run as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.backends.triton.inputs import Frame, TritonInputs, padded_decode, prompt_example
from octavo.backends.triton.ops import TritonKV
from octavo.plugins import Handle, PackedWeight, StepOut

Forward = Callable[..., tuple[StepOut, list[Handle]]]

GRAPH_SEQS = 512
"""No graph is captured for more sequences: launches no longer dominate such a step."""

PROMPT_TOKENS = 64
"""Length of the prompt that is run at the start: more tokens than a decode tile takes."""

INTERPRETED_SEQS = 4
"""The same where nothing is gained: enough to check that frames work."""


def decode_buckets(max_seqs: int, most: int = GRAPH_SEQS) -> tuple[int, ...]:
    """Numbers of sequences up to `most` for which decode steps are captured: close together where
    padding would cost much of a step, an eighth apart further up."""
    last = min(max_seqs, most)
    sizes = [1, 2, 4]
    while sizes[-1] < last:
        sizes.append(sizes[-1] + max(4, 1 << max(0, sizes[-1].bit_length() - 4)))
    return (*(size for size in sizes if size < last), last)


@dataclass
class Captured:
    """A bucket's frame and what computes the logits of the step that it holds."""

    frame: Frame
    replay: Callable[[Mapping[str, PackedWeight], list[TritonKV]], torch.Tensor]


class DecodeGraphs:
    """The forward program: fn(weights, kv, inputs) -> (StepOut with float32 logits, kv).

    Args:
        forward: the forward pass as it is.
        max_seqs: the most sequences of a step.
        device: torch device; on the CPU (the interpreter) a bucket's frame is run and not captured.
        blocks: the most blocks of a sequence, or None: as many as the cache has.
    """

    def __init__(
        self, forward: Forward, max_seqs: int, device: str, blocks: int | None = None
    ) -> None:
        self._forward, self._blocks = forward, blocks
        self._device = torch.device(device)
        gpu = self._device.type == "cuda"
        self.buckets = decode_buckets(max_seqs, GRAPH_SEQS if gpu else INTERPRETED_SEQS)
        self.compilations = 0
        self._captured: dict[int, Captured] = {}
        self._memory: Any = None  # shared by all graphs: they never run at the same time
        self._weights = 0
        self._pool: weakref.ref[Any] | None = None

    def __call__(
        self, weights: Mapping[str, PackedWeight], kv: list[TritonKV], inputs: TritonInputs
    ) -> tuple[StepOut, list[Handle]]:
        self._check_bound(weights, kv)
        if inputs.batch.num_tokens == 0:
            self._warm_up(weights, kv, inputs)
        size = self._bucket(inputs)
        if size is None:
            return self._plain(weights, kv, inputs)
        captured = self._at(size, weights, kv, inputs)
        captured.frame.load(padded_decode(inputs.batch, size), inputs.prev)
        logits = captured.replay(weights, kv)
        return StepOut(logits=logits[: inputs.batch.num_seqs]), kv

    def _warm_up(
        self, weights: Mapping[str, PackedWeight], kv: list[TritonKV], inputs: TritonInputs
    ) -> None:
        """Captures all buckets, and compiles what prompts need. `inputs` has no tokens."""
        for size in reversed(self.buckets):  # the largest first: the others fit its memory
            self._at(size, weights, kv, inputs)
        prompt = prompt_example(inputs.batch, PROMPT_TOKENS)
        self._plain(weights, kv, TritonInputs(prompt, None, str(self._device)))

    def _at(
        self,
        size: int,
        weights: Mapping[str, PackedWeight],
        kv: list[TritonKV],
        inputs: TritonInputs,
    ) -> Captured:
        """The bucket, captured if it was not. `inputs`: a decode step of at most its size."""
        if size not in self._captured:
            batch = padded_decode(inputs.batch, size)
            first = TritonInputs(batch, inputs.prev, str(self._device))
            self._plain(weights, kv, first)  # compiles the kernels, and tells what layers ask for
            self._captured[size] = self._capture(weights, kv, first)
            self.compilations += 1
        return self._captured[size]

    def _plain(
        self, weights: Mapping[str, PackedWeight], kv: list[TritonKV], inputs: TritonInputs
    ) -> tuple[StepOut, list[Handle]]:
        out, kv = self._forward(weights, kv, inputs)
        return StepOut(logits=out.logits.float(), hidden=out.hidden), kv

    def _logits(
        self, weights: Mapping[str, PackedWeight], kv: list[TritonKV], inputs: TritonInputs
    ) -> torch.Tensor:
        logits: torch.Tensor = self._plain(weights, kv, inputs)[0].logits
        return logits

    def _bucket(self, inputs: TritonInputs) -> int | None:
        """The bucket of a plain decode step, or None."""
        batch = inputs.batch
        seqs, rows = batch.num_seqs, len(batch.logits_rows)
        # A batch that the core has padded, or that draws twice from a row, is run as it is.
        if not batch.num_tokens == len(batch.token_ids) == seqs == len(batch.context_lens) == rows:
            return None
        if batch.max_query_len != 1 or not np.array_equal(batch.logits_rows, np.arange(rows)):
            return None
        return next((size for size in self.buckets if size >= seqs), None)

    def _check_bound(self, weights: Mapping[str, PackedWeight], kv: list[TritonKV]) -> None:
        """Forgets graphs captured over other weights or another cache. Holds neither: they must go when
        the engine lets them go."""
        pool = self._pool() if self._pool is not None else None
        if pool is not kv[0].pool or self._weights != id(weights):
            self._captured.clear()
            self._memory = None
            self._pool, self._weights = weakref.ref(kv[0].pool), id(weights)

    def _capture(
        self, weights: Mapping[str, PackedWeight], kv: list[TritonKV], first: TritonInputs
    ) -> Captured:
        frame = Frame(first, self._blocks or kv[0].pool.num_blocks)
        if self._device.type != "cuda":
            # What the interpreter runs cannot be captured: the same step over the same memory.
            return Captured(frame, lambda weights, kv: self._logits(weights, kv, frame))
        frame.load(first.batch, None)
        # Sequences may be split in a frame, which they were not in `first`: compiles that, too, since
        # nothing may be loaded during a capture.
        self._plain(weights, kv, frame)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._logits(weights, kv, frame)
        self._memory = graph.pool()

        def replay(_weights: Mapping[str, PackedWeight], _kv: list[TritonKV]) -> torch.Tensor:
            graph.replay()
            return logits

        return Captured(frame, replay)
