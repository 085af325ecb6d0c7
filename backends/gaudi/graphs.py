"""HPU graphs: one for each shape of a batch, captured when the shape is first met and replayed after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from octavo.backends.gaudi.attention import GaudiKV
from octavo.backends.gaudi.inputs import GaudiInputs, continued, signature, tensors, without_begun
from octavo.backends.gaudi.ops import clear_blocks
from octavo.backends.gaudi.vendor import Vendor
from octavo.plugins import StepOut

Forward = Callable[[Mapping[str, Any], list[GaudiKV], GaudiInputs], tuple[StepOut, list[GaudiKV]]]


@dataclass(slots=True)
class _Captured:
    graph: Any
    inputs: GaudiInputs
    logits: torch.Tensor
    weights: Mapping[str, Any]
    caches: list[GaudiKV]

    def reads(self, weights: Mapping[str, Any], kv: list[GaudiKV]) -> bool:
        """Whether it was captured over these very tensors."""
        return self.weights is weights and all(
            mine is theirs for mine, theirs in zip(self.caches, kv, strict=True)
        )


class GraphedForward:
    """The forward program, with `mark_step` at its ends and, in lazy mode, replayed from graphs.

    A graph reads its inputs where they lay when it was captured, so each batch is copied there. Clearing
    begun blocks stays outside: it is rare, and their number is no part of a shape.

    compilations: graphs captured so far.
    """

    def __init__(self, forward: Forward, lib: Vendor, graphs: bool) -> None:
        self._forward, self._lib, self._graphs = forward, lib, graphs
        self._captured: dict[tuple[Any, ...], _Captured] = {}

    @property
    def compilations(self) -> int:
        return len(self._captured)

    def __call__(
        self, weights: Mapping[str, Any], kv: list[GaudiKV], inputs: GaudiInputs
    ) -> tuple[StepOut, list[GaudiKV]]:
        for cache in kv:
            begun = inputs.groups[cache.group].begun
            if begun is not None:
                clear_blocks(cache, begun)
        rest = without_begun(inputs)
        self._lib.mark_step()  # the batch is on the device before the step that reads it begins
        if self._graphs:
            if inputs.empty:  # a trial of this shape: prompts also run another way
                self._run(weights, kv, continued(rest))
            logits = self._run(weights, kv, rest)
        else:
            out, kv = self._forward(weights, kv, rest)
            logits = out.logits
        self._lib.mark_step()
        return StepOut(logits=logits), kv

    def _run(
        self, weights: Mapping[str, Any], kv: list[GaudiKV], inputs: GaudiInputs
    ) -> torch.Tensor:
        key = signature(inputs)
        found = self._captured.get(key)
        if found is None or not found.reads(weights, kv):
            found = self._captured[key] = self._capture(weights, kv, inputs)
        else:
            for mine, theirs in zip(tensors(found.inputs), tensors(inputs), strict=True):
                if mine is not None and theirs is not None:
                    mine.copy_(theirs)
            self._lib.mark_step()
        # Also after a capture: whether that computed anything differs between the vendor's releases, and
        # the same step twice writes the same.
        found.graph.replay()
        return found.logits

    def _capture(
        self, weights: Mapping[str, Any], kv: list[GaudiKV], inputs: GaudiInputs
    ) -> _Captured:
        kept = _own(inputs)
        self._lib.mark_step()
        graph = self._lib.hpu.HPUGraph()
        with self._lib.hpu.graph(graph):
            out, _ = self._forward(weights, list(kv), kept)
        kept.made.clear()
        kept.written.clear()
        return _Captured(graph, kept, out.logits, weights, list(kv))


def _own(value: Any) -> Any:
    """A copy of an input that nothing else writes to."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(_own(part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _own(getattr(value, f.name)) for f in fields(value)})
    return type(value)() if isinstance(value, (dict, list)) else value
