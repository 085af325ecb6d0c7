"""The one shared model runner: a step plan in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

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
    handle_of,
)
from octavo.core.loading.progress import Progress
from octavo.core.models.base import Model, wanted
from octavo.core.pooler import pool, pools
from octavo.core.sampler import Sampler, StaticSampler, sample_program
from octavo.core.structured import Grammars
from octavo.core.types import Batch, StepPlan, StepResult, TokenLogprobs
from octavo.core.warm_up import example_batches

if TYPE_CHECKING:
    from octavo.core.host_store import HostStore


def forward_program(model: Model) -> Callable[..., tuple[StepOut, list[Handle]]]:
    """fn(weights, kv, inputs) -> (StepOut with logits [L, V] of `inputs.logits_rows`, kv)."""

    def forward(
        weights: Mapping[str, PackedWeight], kv: list[Handle], inputs: Inputs
    ) -> tuple[StepOut, list[Handle]]:
        ctx = Ctx(weights, kv, inputs, logits_only=True)
        return StepOut(logits=model.step_logits(ctx)), ctx.kv

    return forward


def embed_program(model: Model) -> Callable[..., tuple[StepOut, list[Handle]]]:
    """The forward program of steps in which prompts are embedded: with hidden [T, H], the normed states of
    all rows. A model that generates nothing has no logits."""

    def embed(
        weights: Mapping[str, PackedWeight], kv: list[Handle], inputs: Inputs
    ) -> tuple[StepOut, list[Handle]]:
        ctx = Ctx(weights, kv, inputs)
        hidden = model.hidden(ctx)
        rows = wanted(hidden, inputs)
        logits = model.logits(rows, ctx) if model.generates else rows
        return StepOut(logits=logits, hidden=hidden), ctx.kv

    return embed


class Runner:
    """Drives one model on one device through what its backend compiled.

    Args:
        weights: packed weights and tables by name.
        kv: one handle per layer; alloc_kv: makes such a KV cache anew, empty.
        vocabulary: skip_special -> the vocabulary's bytes, for bad_words.
        grammars: those of structured output.
        host: where blocks are kept that a plan sends to the host.
        embeds: whether requests may ask for embeddings.
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
        alloc_kv: Callable[[], list[Handle]],
        vocabulary: Callable[[bool], VocabularyIndex],
        num_groups: int = 1,
        grammars: Grammars | None = None,
        host: HostStore | None = None,
        embeds: bool = False,
    ) -> None:
        self._backend, self._device, self._ops = backend, device, ops
        self._host = host
        self._weights, self._kv = weights, kv
        self._alloc_kv = alloc_kv
        self._builders = [
            BatchBuilder(lane, plan.block_size, num_groups, index=i)
            for i, lane in enumerate(plan.lanes)
        ]
        self._plan, self._groups = plan, num_groups
        if embeds:
            embed = Program("embed", embed_program(model), model, groups=num_groups)
            self._embed = backend.compile(embed, plan, device)
        if model.generates:
            forward = Program("forward", forward_program(model), model, groups=num_groups)
            self._forward = backend.compile(forward, plan, device)
        else:
            self._forward = self._embed
        self._lanes = plan.lanes
        where = backend.torch_device(device)
        static = backend.capabilities(device).shapes == "static"
        draw = sample_program(ops) if static else ops.sample
        sample = Program("sample", draw, model, groups=num_groups)
        self._sample = backend.compile(sample, plan, device)
        self._sampler = (
            StaticSampler(self._sample, where, vocabulary, grammars)
            if static
            else Sampler(self._sample, ops, where, vocabulary, grammars)
        )

    def warm_up(self, progress: Progress) -> int:
        """Runs the programs once at every shape that a step can have, so that none is compiled later.
        Returns how many shapes there are."""
        import torch

        batches = list(example_batches(self._plan.lanes, self._groups))
        task = progress.task(f"Warming up {len(batches)} shapes", len(batches))
        seen: set[tuple[int, ...]] = set()
        with torch.inference_mode():
            for batch in batches:
                logits = self._run(batch, self._forward).logits
                if tuple(logits.shape) not in seen:
                    seen.add(tuple(logits.shape))
                    self._sampler.warm_up(logits)
                task.advance(1)
        task.close()
        return len(batches)

    @property
    def compilations(self) -> int:
        """Programs that the backend says it has built."""
        programs = (self._forward, self._sample)
        return sum(int(getattr(program, "compilations", 0)) for program in programs)

    def execute(self, step: StepPlan) -> StepResult:
        """Copies blocks (out to the host, on the device, in from the host), runs the forward pass and draws
        the step's tokens."""
        import torch

        host = self._host if step.swap_out or step.swap_in else None
        with torch.inference_mode():
            if host is not None:
                host.start(step, self._kv)
            if step.copies:
                copied = self._ops.copy_blocks(self._kv, step.copies)
                self._kv = handle_of("copy_blocks", copied)
            if host is not None:
                self._kv = host.bring(step, self._kv)
            # All lanes are under way before the host waits for the first one's tokens.
            under_way = []
            pooled: dict[str, bytes] = {}
            for part in step.parts:
                batch = self._build(part)
                padded = batch.num_rows if self._lanes[part.lane].row_buckets else None
                if batch.kind != "decode" and pools(part.items):
                    out = self._run(batch, self._embed)
                    pooled |= pool(part, batch, out.hidden)
                else:
                    out = self._run(batch, self._forward)
                under_way.append((part, out.logits, padded))
            found = [self._sampler.run(part, logits, rows) for part, logits, rows in under_way]
            if host is not None:
                host.finish()
        result = found[0] if len(found) == 1 else _joined(found)
        return replace(result, pooled=pooled) if pooled else result

    def _build(self, part: StepPlan) -> Batch:
        return self._builders[part.lane].build(part)

    def _run(self, batch: Batch, program: Callable[..., Any]) -> StepOut:
        """The forward pass of one lane's batch."""
        inputs = self._backend.prepare(batch, None, self._device)
        out: StepOut
        out, self._kv = program(self._weights, self._kv, inputs)
        return out

    def recover(self) -> bool:
        """After a step that failed: whether the KV cache was lost, and is a new and empty one now."""
        if not self._ops.kv_lost(self._kv):
            return False
        self._kv = []  # before there is another
        self._kv = self._alloc_kv()
        return True

    def close(self) -> None:
        """Drops weights and KV cache."""
        self._weights, self._kv, self._host = {}, [], None
        self._alloc_kv = list

    @property
    def kv(self) -> list[Any]:
        return self._kv


def _joined(found: Sequence[StepResult]) -> StepResult:
    """The results of a step's lanes as one."""
    logprobs: list[TokenLogprobs | None] = []
    if any(result.logprobs for result in found):
        for result in found:
            logprobs.extend(result.logprobs or [None] * len(result.tokens))
    prompt = {name: entries for result in found for name, entries in result.prompt_logprobs.items()}
    candidates = {}
    before = 0
    for result in found:
        candidates.update({before + i: each for i, each in result.candidates.items()})
        before += len(result.tokens)
    tokens = np.concatenate([result.tokens for result in found])
    return StepResult(tokens, logprobs, prompt, candidates)
