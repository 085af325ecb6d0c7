"""NPU graphs for decode steps: one for each bucket, captured when it is first met and replayed after.

A captured attention call holds the lengths it was launched with. torch-npu records such calls while it
captures (`auto_dispatch_capture`), and `NPUGraph.update` launches them anew with this step's lengths; both
happen in here, so the runner sees a function like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from octavo.backends.ascend.inputs import Step, step_of
from octavo.backends.vendor_graphs import Forward, Graphs, load
from octavo.core.ops import KVPair, TorchInputs
from octavo.plugins import StepOut


class GraphedForward(Graphs):
    """The forward program; decode steps of at most `largest` rows run from graphs."""

    def __init__(self, forward: Forward, npu: Any, largest: int) -> None:
        super().__init__(forward)
        self._npu, self._largest = npu, largest

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
        found = self.found(key, weights, kv)
        if found is None:
            # Once outside: what a first call sets up may not be part of a graph, and not every model can
            # be. It writes what the replay will write again.
            out, _ = self._forward(weights, list(kv), inputs)
            if step.host_bound:
                self._largest = 0
                return out.logits  # type: ignore[no-any-return]
            kept = _own(inputs)
            graph = self._npu.npu.NPUGraph()
            capturing = self._npu.npu.graph(graph, auto_dispatch_capture=True)
            found = self.capture(key, weights, kv, kept, graph, capturing)
            step_of(kept).made.clear()
        else:
            load(_tensors(found.inputs), _tensors(inputs))
        # Every recorded call takes those of these that it was launched with.
        lengths = {
            "context_lens": step.host_lengths,
            "actual_seq_lengths_kv": step.kv_lengths,
            "actual_seq_kvlen": step.kv_lengths,
        }
        found.graph.update(cpu_update_input=[lengths])
        found.graph.replay()
        return found.logits


def _own(inputs: TorchInputs) -> TorchInputs:
    """A copy of what a graph reads that nothing else writes to."""
    step = step_of(inputs)
    return replace(
        inputs,
        token_ids=inputs.token_ids.clone(),
        positions=inputs.positions.clone(),
        slots=tuple(t.clone() for t in inputs.slots),
        block_tables=(),
        logits_rows=_rows(inputs).clone(),
        extra=replace(step, tables=tuple(t.clone() for t in step.tables), made={}),
    )


def _tensors(inputs: TorchInputs) -> list[torch.Tensor]:
    """What a graph reads of a batch."""
    step = step_of(inputs)
    return [inputs.token_ids, inputs.positions, *inputs.slots, _rows(inputs), *step.tables]


def _rows(inputs: TorchInputs) -> torch.Tensor:
    """The rows of logits, which this backend always names."""
    assert inputs.logits_rows is not None
    return inputs.logits_rows
