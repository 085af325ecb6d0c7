"""The one shared model runner: a step plan in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.core.bad_words import VocabularyIndex
from octavo.core.batch import BatchBuilder
from octavo.core.contract import (
    Backend,
    Ctx,
    ExecutionPlan,
    Handle,
    Inputs,
    Ops,
    PackedWeight,
    Program,
    StepOut,
)
from octavo.core.models.base import Model
from octavo.core.sampler import Sampler
from octavo.core.types import Batch, StepPlan, StepResult


def forward_program(model: Model) -> Callable[..., tuple[StepOut, list[Handle]]]:
    """fn(weights, kv, inputs) -> (StepOut with logits [L, V] of `inputs.logits_rows`, kv)."""

    def forward(
        weights: Mapping[str, PackedWeight], kv: list[Handle], inputs: Inputs
    ) -> tuple[StepOut, list[Handle]]:
        ctx = Ctx(weights, kv, inputs)
        hidden = model.hidden(ctx)
        logits = model.logits(hidden[inputs.logits_rows], ctx)
        return StepOut(logits=logits), ctx.kv

    return forward


class Runner:
    """Drives one model on one device through what its backend compiled.

    Args:
        weights: packed weights and tables by name.
        kv: one handle per layer.
        vocabulary: skip_special -> the vocabulary's bytes, for bad_words.
    """

    def __init__(
        self,
        backend: Backend,
        device: str,
        ops: Ops,
        plan: ExecutionPlan,
        model: Model,
        weights: Mapping[str, PackedWeight],
        kv: list[Handle],
        vocabulary: Callable[[bool], VocabularyIndex],
        num_groups: int = 1,
    ) -> None:
        self._backend, self._device, self._ops = backend, device, ops
        self._weights, self._kv = weights, kv
        self._builders = [BatchBuilder(lane, plan.block_size, num_groups) for lane in plan.lanes]
        self._forward = backend.compile(
            Program("forward", forward_program(model), model), plan, device
        )
        sample = backend.compile(Program("sample", ops.sample, model), plan, device)
        self._sampler = Sampler(sample, ops, backend.torch_device(device), vocabulary)

    def execute(self, step: StepPlan) -> StepResult:
        """Copies blocks, runs the forward pass and draws the step's tokens."""
        import torch

        with torch.inference_mode():
            if step.copies:
                self._kv = self._ops.copy_blocks(self._kv, step.copies)
            batch = self._build(step)
            inputs = self._backend.prepare(batch, None, self._device)
            out, self._kv = self._forward(self._weights, self._kv, inputs)
            return self._sampler.run(step, out.logits)

    def _build(self, step: StepPlan) -> Batch:
        return self._builders[step.lane].build(step)

    def close(self) -> None:
        """Drops weights and KV cache."""
        self._weights, self._kv = {}, []

    @property
    def kv(self) -> list[Any]:
        return self._kv
