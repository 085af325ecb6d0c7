"""HPU graphs: one for each shape of a batch, captured when the shape is first met and replayed after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from octavo.backends.gaudi.attention import GaudiKV
from octavo.backends.gaudi.inputs import GaudiInputs, continued, signature, tensors, without_begun
from octavo.backends.gaudi.ops import clear_blocks
from octavo.backends.gaudi.vendor import Vendor
from octavo.backends.vendor_graphs import Forward, Graphs, load
from octavo.plugins import StepOut


class GraphedForward(Graphs):
    """The forward program, with `mark_step` at its ends and, in lazy mode, replayed from graphs.

    A graph reads its inputs where they lay when it was captured, so each batch is copied there. Clearing
    begun blocks stays outside: it is rare, and their number is no part of a shape.
    """

    def __init__(self, forward: Forward, lib: Vendor) -> None:
        super().__init__(forward)
        self._lib = lib

    def __call__(
        self, weights: Mapping[str, Any], kv: list[GaudiKV], inputs: GaudiInputs
    ) -> tuple[StepOut, list[GaudiKV]]:
        for cache in kv:
            begun = inputs.groups[cache.group].begun
            if begun is not None:
                clear_blocks(cache, begun)
        rest = without_begun(inputs)
        self._lib.mark_step()  # the batch is on the device before the step that reads it begins
        if self._lib.lazy:
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
        found = self.found(key, weights, kv)
        if found is None:
            kept = _own(inputs)
            self._lib.mark_step()
            graph = self._lib.hpu.HPUGraph()
            found = self.capture(key, weights, kv, kept, graph, self._lib.hpu.graph(graph))
            kept.made.clear()
            kept.written.clear()
        else:
            load(tensors(found.inputs), tensors(inputs))
            self._lib.mark_step()
        # Also after a capture: whether that computed anything differs between the vendor's releases, and
        # the same step twice writes the same.
        found.graph.replay()
        return found.logits


def _own(value: Any) -> Any:
    """A copy of an input that nothing else writes to."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(_own(part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _own(getattr(value, f.name)) for f in fields(value)})
    return type(value)() if isinstance(value, (dict, list)) else value
