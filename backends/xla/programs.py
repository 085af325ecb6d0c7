"""What the runner calls every step: one compiled program for each bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from octavo.backends.xla import bridge
from octavo.backends.xla.cache import KV
from octavo.backends.xla.inputs import StepInputs
from octavo.plugins import PackedWeight, QuantizedTensor, SampleInputs, StepOut

ROWS = tuple(f.name for f in fields(SampleInputs) if f.name != "all_greedy")
"""What a row is drawn by."""


def tensors_of(weights: Mapping[str, PackedWeight]) -> Iterator[torch.Tensor]:
    """Every tensor among the weights, in one order."""
    for weight in weights.values():
        if isinstance(weight, QuantizedTensor):
            yield from (t for t in (weight.codes, weight.scales, weight.minima) if t is not None)
        else:
            yield weight


@dataclass(frozen=True)
class _Bucket:
    names: list[str]  # of the arrays that go in, one after another in a single upload
    program: bridge.Captured


class Forward:
    """fn(weights, kv, inputs) -> (StepOut, kv) as one program per bucket. The cache handed in is gone afterwards."""

    def __init__(self, fn: Callable[..., tuple[StepOut, list[KV]]]) -> None:
        self._fn = fn
        self._buckets: dict[Any, _Bucket] = {}

    @property
    def compilations(self) -> int:
        """Programs built so far."""
        return len(self._buckets)

    @bridge.plain_tensors()
    def __call__(
        self, weights: Mapping[str, PackedWeight], kv: list[KV], inputs: StepInputs
    ) -> tuple[StepOut, list[KV]]:
        bucket = self._buckets.get(inputs.key)
        if bucket is None:
            bucket = self._buckets[inputs.key] = self._capture(weights, kv, inputs)
        flat = bridge.upload(inputs.flat(bucket.names))
        logits, *after = bucket.program([flat, *(h.spend() for h in kv), *tensors_of(weights)])
        return StepOut(logits=logits), [h.after(data) for h, data in zip(kv, after, strict=True)]

    def _capture(
        self, weights: Mapping[str, PackedWeight], kv: list[KV], inputs: StepInputs
    ) -> _Bucket:
        names, step, args = self._as_function(weights, kv, inputs)
        return _Bucket(names, bridge.Captured(step, args, donated=range(1, 1 + len(kv))))

    @bridge.plain_tensors()
    def stablehlo(
        self, weights: Mapping[str, PackedWeight], kv: list[KV], inputs: StepInputs
    ) -> str:
        """The program of these inputs' bucket, not compiled, as StableHLO text."""
        _, step, args = self._as_function(weights, kv, inputs)
        return bridge.stablehlo(step, args)

    def _as_function(
        self, weights: Mapping[str, PackedWeight], kv: list[KV], inputs: StepInputs
    ) -> tuple[list[str], Callable[..., list[torch.Tensor]], list[torch.Tensor]]:
        """The arrays that a step takes, in order, the step, and the tensors that it is a function of."""
        # Once to see which arrays the model's operations ask for, and once with all of them in one.
        self._fn(weights, list(kv), inputs)
        bridge.forget()
        names = inputs.asked_for
        flat = bridge.upload(inputs.flat(names))

        def step(*_: torch.Tensor) -> list[torch.Tensor]:
            out, after = self._fn(weights, list(kv), inputs.reading(names, flat))
            assert out.logits is not None
            return [bridge.cut(out.logits, None), *(h.cut(h.data) for h in after)]

        return names, step, [flat, *(h.data for h in kv), *tensors_of(weights)]


class Sample:
    """fn(logits [L, V], SampleInputs) -> tokens [L] as one program per number of rows, and one more where all are
    greedy."""

    def __init__(self, fn: Callable[[torch.Tensor, SampleInputs], torch.Tensor]) -> None:
        self._fn = fn
        self._programs: dict[tuple[Any, ...], bridge.Captured] = {}

    @property
    def compilations(self) -> int:
        """Programs built so far."""
        return len(self._programs)

    @bridge.plain_tensors()
    def __call__(self, logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        # Greedy rows need nothing but logits; what they do not need may be shared, and never uploaded.
        names = () if rows.all_greedy else ROWS
        args = [logits, *(getattr(rows, name) for name in names)]
        key = (tuple(logits.shape), logits.dtype, rows.all_greedy)
        if key not in self._programs:

            def draw(given: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
                drawn_by = dict.fromkeys(ROWS) | dict(zip(names, values, strict=True))
                inputs = SampleInputs(**drawn_by, all_greedy=rows.all_greedy)
                return [bridge.cut(self._fn(given, inputs), None)]

            self._programs[key] = bridge.Captured(draw, args)
        return self._programs[key](args)[0]
