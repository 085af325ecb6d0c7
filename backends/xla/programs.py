"""What the runner calls every step: one compiled program for each bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F

from octavo.backends.xla import bridge
from octavo.backends.xla.cache import KV
from octavo.backends.xla.inputs import StepInputs, row_bucket
from octavo.plugins import PackedWeight, QuantizedTensor, SampleInputs, StepOut


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
    """fn(weights, kv, inputs) -> (StepOut, kv) as one program per bucket. The cache handed in is gone afterwards.

    Logits come back on the host, cut to the rows that were asked for.
    """

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
        args = [flat, *(h.data for h in kv), *tensors_of(weights)]
        logits, *after = bucket.program(args)
        kv = [h.after(data) for h, data in zip(kv, after, strict=True)]
        return StepOut(logits=logits.cpu()[: inputs.rows]), kv

    def _capture(
        self, weights: Mapping[str, PackedWeight], kv: list[KV], inputs: StepInputs
    ) -> _Bucket:
        # Once to see which arrays the model's operations ask for, and once with all of them in one.
        self._fn(weights, list(kv), inputs)
        bridge.forget()
        names = inputs.asked_for
        flat = bridge.upload(inputs.flat(names))

        def step(*_: torch.Tensor) -> list[torch.Tensor]:
            out, after = self._fn(weights, list(kv), inputs.reading(names, flat))
            return [out.logits, *(h.data for h in after)]

        args = [flat, *(h.data for h in kv), *tensors_of(weights)]
        return _Bucket(names, bridge.Captured(step, args, donated=range(1, 1 + len(kv))))


class Sample:
    """fn(logits [L, V], SampleInputs) -> tokens [L] as one program per bucket of rows, and one more where all rows
    are greedy. Rows may come from the host; tokens go there."""

    def __init__(self, fn: Callable[[torch.Tensor, SampleInputs], torch.Tensor]) -> None:
        self._fn = fn
        self._programs: dict[tuple[int, bool], bridge.Captured] = {}

    @property
    def compilations(self) -> int:
        """Programs built so far."""
        return len(self._programs)

    @bridge.plain_tensors()
    def __call__(self, logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        count = len(logits)
        more = row_bucket(count) - count
        names = [] if rows.all_greedy else [f.name for f in fields(rows) if f.name != "all_greedy"]
        args = [bridge.upload(F.pad(logits, (0, 0, 0, more)))]
        args += [bridge.upload(F.pad(getattr(rows, name), (0, more))) for name in names]
        key = (count + more, rows.all_greedy)
        if key not in self._programs:
            self._programs[key] = bridge.Captured(self._traced(names, rows.all_greedy), args)
        return self._programs[key](args)[0].cpu()[:count]

    def _traced(self, names: list[str], all_greedy: bool) -> Callable[..., list[torch.Tensor]]:
        def draw(logits: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
            given: dict[str, Any] = dict.fromkeys(
                ("temperature", "top_k", "top_p", "min_p", "seed", "counter")
            )
            given.update(zip(names, values, strict=True))
            return [self._fn(logits, SampleInputs(**given, all_greedy=all_greedy))]

        return draw
