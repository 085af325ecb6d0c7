"""Compiled programs. The chip builds one for every shape, while it starts and never after that."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from octavo.plugins import ExecutionPlan, Handle, PackedWeight, Program, SampleInputs, StepOut
from octavo_strict.chip import CHIP, HostError, RecompileError, ShapeError
from octavo_strict.inputs import StrictInputs

_ALLOWED = {"cpu", "__get__", "size", "dim", "numel", "__len__", "__repr__"}
"""What the host may do with a tensor on the device: fetch it, and ask for its shape."""


class OnDevice(torch.Tensor):
    """A tensor that the host may fetch, and do nothing else with."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__ not in _ALLOWED:
            raise HostError(f"{func.__name__} of a tensor on the device, outside of any program")
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func.__name__ == "cpu":
            return found.as_subclass(torch.Tensor).clone()
        return found


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A result that stays on the device."""
    return tensor.as_subclass(OnDevice)


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor for a program to compute with."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class WarmUp:
    """Whether an engine is still starting: until the first batch that is not all padding."""

    def __init__(self) -> None:
        self.over = False


class _Compiled:
    """One program for each shape.

    Attributes:
        compilations: how many there are.
    """

    def __init__(self, warm_up: WarmUp) -> None:
        self._warm_up = warm_up
        self._programs: set[Hashable] = set()

    @property
    def compilations(self) -> int:
        return len(self._programs)

    def _need(self, shape: Hashable, what: str) -> None:
        if shape in self._programs:
            return
        if self._warm_up.over:
            raise RecompileError(f"{what} of {shape} was not compiled at the start")
        self._programs.add(shape)
        CHIP.counts["compilations"] += 1


class Forward(_Compiled):
    """The forward pass. Its logits are bfloat16."""

    def __init__(self, program: Program, plan: ExecutionPlan, warm_up: WarmUp) -> None:
        super().__init__(warm_up)
        self._fn = program.fn
        self._known = {
            (b.kind, len(b.token_ids), len(b.context_lens), b.block_tables[0].shape[1], len(b.logits_rows))
            for b in program.example_batches(plan)
        }  # fmt: skip

    def __call__(
        self, weights: Mapping[str, PackedWeight], kv: list[Handle], inputs: StrictInputs
    ) -> tuple[StepOut, list[Handle]]:
        shape = (inputs.kind, *inputs.shape)
        if shape not in self._known:
            raise ShapeError(f"forward of {shape}, which no lane of the plan comes to")
        if inputs.num_tokens:
            self._warm_up.over = True
        self._need(shape, "forward")
        CHIP.counts["forward"] += 1
        out, kv = self._fn(weights, kv, inputs)
        return StepOut(logits=on_device(out.logits.bfloat16())), kv


class Draw(_Compiled):
    """The draw: logits [L, V] as `Forward` gave them, to tokens [L]."""

    def __init__(self, program: Program, warm_up: WarmUp) -> None:
        super().__init__(warm_up)
        self._fn = program.fn

    def __call__(self, logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        if not isinstance(logits, OnDevice):
            raise HostError("the draw was given logits that are not on the device")
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "counter"):
            column = getattr(rows, name)
            if tuple(column.shape) != (len(logits),):
                raise ShapeError(f"{name} {tuple(column.shape)} for {len(logits)} rows of logits")
        self._need((tuple(logits.shape), rows.all_greedy), "sample")
        CHIP.counts["sample"] += 1
        found: torch.Tensor = self._fn(inside(logits), rows)
        return on_device(found)
