"""Decode steps as captured graphs: launching a few hundred kernels one by one takes longer than they run.

A step in which every sequence has one token is padded to a bucket of sequences. For each bucket the
forward pass runs once as it is, is then captured over memory that stays where it is (`Frame`), and
afterwards only replayed. Other steps run as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.backends.triton.inputs import Frame, TritonInputs, padded_decode
from octavo.backends.triton.ops import TritonKV
from octavo.plugins import Handle, PackedWeight, StepOut

Forward = Callable[..., tuple[StepOut, list[Handle]]]

GRAPH_SEQS = 512
"""No graph is captured for more sequences: launches no longer dominate such a step."""


def decode_buckets(max_seqs: int) -> tuple[int, ...]:
    """Numbers of sequences for which decode steps are captured: close together where padding would
    cost most of a step, at most an eighth apart further up."""
    sizes = [1, 2, 4]
    while sizes[-1] < min(max_seqs, GRAPH_SEQS):
        sizes.append(sizes[-1] + max(4, 1 << max(0, sizes[-1].bit_length() - 4)))
    return tuple(size for size in sizes if size < max_seqs) + (
        (max_seqs,) if max_seqs <= GRAPH_SEQS else ()
    )


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
        self.buckets = decode_buckets(max_seqs)
        self.compilations = 0
        self._captured: dict[int, Captured] = {}
        self._memory: Any = None  # shared by all graphs: they never run at the same time
        self._weights = 0
        self._pool: weakref.ref[Any] | None = None

    def __call__(
        self, weights: Mapping[str, PackedWeight], kv: list[TritonKV], inputs: TritonInputs
    ) -> tuple[StepOut, list[Handle]]:
        size = self._bucket(inputs)
        if size is None:
            return self._plain(weights, kv, inputs)
        self._check_bound(weights, kv)
        rows = inputs.batch.num_seqs
        batch = padded_decode(inputs.batch, size)
        captured = self._captured.get(size)
        if captured is None:
            first = TritonInputs(batch, inputs.prev, str(self._device))
            out, kv = self._plain(weights, kv, first)
            self._captured[size] = self._capture(weights, kv, first)
            self.compilations += 1
            return StepOut(logits=out.logits[:rows]), kv
        captured.frame.load(batch, inputs.prev)
        return StepOut(logits=captured.replay(weights, kv)[:rows]), kv

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
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._logits(weights, kv, frame)
        self._memory = graph.pool()

        def replay(_weights: Mapping[str, PackedWeight], _kv: list[TritonKV]) -> torch.Tensor:
            graph.replay()
            return logits

        return Captured(frame, replay)
