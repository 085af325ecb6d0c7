"""What backends have in common whose chip is driven by its maker's own package for torch.

Such a chip's attention is laid out for blocks of 128 tokens, steps are replayed from graphs, ranks meet over HCCL,
and what the vendor has no operation for is torch on the device. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from octavo.plugins import (
    Backend,
    Batch,
    Capabilities,
    Communicator,
    ExecutionPlan,
    Lane,
    Limits,
    MemoryInfo,
    ModelShape,
    Probe,
    StepOut,
)

if TYPE_CHECKING:
    import torch

    from octavo.backends.hccl import HcclCommunicator

BLOCK = 128
"""Tokens in a KV block: what these vendors' attention is laid out for."""

Upload = Callable[[np.ndarray[Any, Any]], "torch.Tensor"]
"""Brings a host array of integers to the device, as int32 or int64. The array may change afterwards."""


def placed(
    slots: np.ndarray[Any, Any], scratch: int, reserved: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """slots [T] of the core in a cache that has `reserved` blocks of its own in front; rows of padding go to its
    block `scratch`."""
    padding = scratch * BLOCK + np.arange(len(slots)) % BLOCK
    return np.where(slots >= 0, slots + reserved * BLOCK, padding)


class VendorBackend(Backend):
    """`--device WORD`, or `WORD:1` for the second device. A subclass says what is its vendor's own.

    dtypes: of weights and cache. kv_equals_dtype, head_sizes, shapes: as in `Capabilities`. op_names, notes: its
    `ops` and `notes`, but for what all such chips have in common. chip: its name. hccl: the module that gives
    torch.distributed its backend "hccl", if that is one of its own.
    """

    priority = 30

    dtypes: ClassVar[tuple[str, ...]]
    kv_equals_dtype: ClassVar[bool] = False
    head_sizes: ClassVar[tuple[int, int, int]]
    shapes: ClassVar[Literal["dynamic", "bucketed"]]
    op_names: ClassVar[Mapping[str, str]]
    notes: ClassVar[Mapping[str, str]]
    chip: ClassVar[str]
    hccl: ClassVar[str] = ""

    def __init__(self) -> None:
        self._communicator: HcclCommunicator | None = None

    def why_absent(self) -> str | None:
        """Why no device can be used here, or None. Imports nothing."""
        raise NotImplementedError

    def device_nodes(self) -> list[str]:
        """The driver's devices."""
        raise NotImplementedError

    def stand_in(self) -> str | None:
        """What takes the vendor's place here, or None."""
        return None

    def module(self) -> Any:
        """The vendor's module for its devices, like torch.cuda; torch knows them once this was called.

        Raises:
            ConfigError: it cannot be imported.
        """
        raise NotImplementedError

    def lanes(self, limits: Limits) -> tuple[Lane, ...]:
        """The lanes of a plan."""
        raise NotImplementedError

    def inputs(self, batch: Batch, upload: Upload) -> Any:
        """A batch on the device, with the tokens that the host knows."""
        raise NotImplementedError

    def probe(self) -> Probe:
        reason = self.why_absent()
        if reason is not None:
            return Probe(reason=reason)
        word = self.device_types[0]
        note = self.stand_in()
        if note is not None:
            return Probe(devices=(word,), details={"stand-in": note})
        nodes = self.device_nodes()
        words = (word, *(f"{word}:{i}" for i in range(1, len(nodes))))
        return Probe(devices=words, details={"nodes": ", ".join(nodes)})

    def torch_device(self, device: str) -> str:
        return device

    def capabilities(self, device: str) -> Capabilities:
        note = self.stand_in()
        return Capabilities(
            dtypes=self.dtypes,
            native_dtypes=self.dtypes,
            kv_dtypes=self.dtypes,
            kv_equals_dtype=self.kv_equals_dtype,
            block_sizes=(BLOCK,),
            head_sizes=self.head_sizes,
            shapes=self.shapes,
            graph_capture=True,
            swap=True,
            collectives=("all_reduce",),
            ops={
                **self.op_names,
                "sample": "greedy: torch on the device; seeded: portable on the host",
                "every op": "torch on the device",
            },
            notes={
                "executed on": f"stand-in: {note}" if note else f"this machine's {self.chip}",
                "execution": "stand-in" if note else "device",
                **self.notes,
            },
        )

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        plan = super().plan(model, device, limits)
        return replace(plan, block_size=limits.block_size or BLOCK, lanes=self.lanes(limits))

    def memory(self, device: str) -> MemoryInfo:
        free, total = self.module().mem_get_info()
        return MemoryInfo(total=total, free=free)

    def start(self, device: str, limits: Limits) -> None:
        self.module().set_device(int(device.partition(":")[2] or 0))

    def prepare(self, batch: Batch, prev: StepOut | None, device: str) -> Any:
        import torch

        from octavo.core.ops import with_drawn

        where = self.torch_device(device)

        def upload(array: np.ndarray[Any, Any]) -> torch.Tensor:
            kind = np.int32 if array.dtype == np.int32 else np.int64
            return torch.from_numpy(np.array(array, kind)).to(where, non_blocking=True)

        made = self.inputs(batch, upload)
        made.token_ids = with_drawn(made.token_ids, batch, prev, upload)
        return made

    def communicator(self, group: Any) -> Communicator:
        if group is None or group.size == 1:
            return Communicator()
        from octavo.backends.hccl import HcclCommunicator

        self.module()
        if self.hccl:
            import_module(self.hccl)
        self._communicator = HcclCommunicator(group)
        return self._communicator
