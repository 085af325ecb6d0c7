"""Steps captured as graphs by a vendor's package for torch, to be replayed (`octavo.backends.vendor`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from octavo.plugins import Handle, Inputs, StepOut

Forward = Callable[..., tuple[StepOut, list[Handle]]]


@dataclass(slots=True)
class Captured:
    """A graph, and the tensors that it reads and writes wherever it is replayed."""

    graph: Any
    inputs: Inputs
    logits: torch.Tensor
    weights: Mapping[str, Any]
    caches: list[Handle]


class Graphs:
    """The forward program and its graphs, one for each key that batches have in common.

    compilations: graphs captured so far.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._captured: dict[Hashable, Captured] = {}

    @property
    def compilations(self) -> int:
        return len(self._captured)

    def found(self, key: Hashable, weights: Mapping[str, Any], kv: list[Handle]) -> Captured | None:
        """The graph of that key, if it was captured over these very tensors."""
        captured = self._captured.get(key)
        if captured is None or captured.weights is not weights:
            return None
        same = all(mine is theirs for mine, theirs in zip(captured.caches, kv, strict=True))
        return captured if same else None

    def capture(
        self,
        key: Hashable,
        weights: Mapping[str, Any],
        kv: list[Handle],
        kept: Inputs,
        graph: Any,
        capturing: AbstractContextManager[Any],
    ) -> Captured:
        """Runs a step into `graph` while it is `capturing`. kept: its inputs, which nothing else writes to."""
        with capturing:
            out, _ = self._forward(weights, list(kv), kept)
        captured = Captured(graph, kept, out.logits, weights, list(kv))
        self._captured[key] = captured
        return captured


def load(kept: Iterable[torch.Tensor | None], new: Iterable[torch.Tensor | None]) -> None:
    """Copies a batch's tensors to where a graph reads them; None stands for one that is absent."""
    for mine, theirs in zip(kept, new, strict=True):
        if mine is not None and theirs is not None:
            mine.copy_(theirs)
