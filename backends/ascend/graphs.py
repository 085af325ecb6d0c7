"""NPU graphs for decode steps: one for each bucket, captured when it is first met and replayed after.

A captured attention call holds the lengths it was launched with. torch-npu records such calls while it
captures (`auto_dispatch_capture`), and `NPUGraph.update` launches them anew with this step's lengths; both
happen in here, so the runner sees a function like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.backends.ascend.inputs import Step, step_of
from octavo.backends.ascend.ops import KVPair
from octavo.core.ops import TorchInputs
from octavo.plugins import StepOut

Forward = Callable[[Mapping[str, Any], list[KVPair], TorchInputs], tuple[StepOut, list[KVPair]]]


@dataclass(slots=True)
class _Captured:
    graph: Any
    inputs: TorchInputs
    logits: torch.Tensor
    weights: Mapping[str, Any]
    caches: list[KVPair]

    def reads(self, weights: Mapping[str, Any], kv: list[KVPair]) -> bool:
        """Whether it was captured over these very tensors."""
        return self.weights is weights and all(
            mine is theirs for mine, theirs in zip(self.caches, kv, strict=True)
        )


class GraphedForward:
    """The forward program; decode steps of at most `largest` rows run from graphs.

    compilations: graphs captured so far.
    """

    def __init__(self, forward: Forward, npu: Any, largest: int) -> None:
        self._forward, self._npu, self._largest = forward, npu, largest
        self._captured: dict[tuple[Any, ...], _Captured] = {}

    @property
    def compilations(self) -> int:
        return len(self._captured)

    def __call__(
        self, weights: Mapping[str, Any], kv: list[KVPair], inputs: TorchInputs
    ) -> tuple[StepOut, list[KVPair]]:
        step = step_of(inputs)
        if step.decode and len(inputs.token_ids) <= self._largest:
            logits = self._replay(weights, kv, inputs, step)
        else:
            out, kv = self._forward(weights, kv, inputs)
            logits = out.logits
        return StepOut(logits=logits[: step.num_rows]), kv

    def _replay(
        self,
        weights: Mapping[str, Any],
        kv: list[KVPair],
        inputs: TorchInputs,
        step: Step,
    ) -> torch.Tensor:
        key = tuple(tuple(t.shape) for t in _tensors(inputs))
        found = self._captured.get(key)
        if found is None or not found.reads(weights, kv):
            # Once outside: what a first call sets up may not be part of a graph, and not every model can
            # be. It writes what the replay will write again.
            out, _ = self._forward(weights, list(kv), inputs)
            if step.host_bound:
                self._largest = 0
                return out.logits  # type: ignore[no-any-return]
            found = self._captured[key] = self._capture(weights, kv, inputs)
        else:
            for mine, theirs in zip(_tensors(found.inputs), _tensors(inputs), strict=True):
                mine.copy_(theirs)
        # Every recorded call takes those of these that it was launched with.
        lengths = {
            "context_lens": step.host_lengths,
            "actual_seq_lengths_kv": step.kv_lengths,
            "actual_seq_kvlen": step.kv_lengths,
        }
        found.graph.update(cpu_update_input=[lengths])
        found.graph.replay()
        return found.logits

    def _capture(
        self, weights: Mapping[str, Any], kv: list[KVPair], inputs: TorchInputs
    ) -> _Captured:
        step = step_of(inputs)
        kept = replace(
            inputs,
            token_ids=inputs.token_ids.clone(),
            positions=inputs.positions.clone(),
            slots=tuple(t.clone() for t in inputs.slots),
            block_tables=(),
            logits_rows=inputs.logits_rows.clone(),
            extra=replace(step, tables=tuple(t.clone() for t in step.tables), made={}),
        )
        graph = self._npu.npu.NPUGraph()
        with self._npu.npu.graph(graph, auto_dispatch_capture=True):
            out, _ = self._forward(weights, list(kv), kept)
        step_of(kept).made.clear()
        return _Captured(graph, kept, out.logits, weights, list(kv))


def _tensors(inputs: TorchInputs) -> list[torch.Tensor]:
    """What a graph reads of a batch."""
    step = step_of(inputs)
    return [inputs.token_ids, inputs.positions, *inputs.slots, inputs.logits_rows, *step.tables]
