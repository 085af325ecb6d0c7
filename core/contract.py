"""The seam between the engine and a hardware backend. Version 1.3.

A backend is one class with working defaults: give it a `name`, `device_types`, `probe` and a torch
device and it serves through the portable ops of `octavo.core.ops`; each further method makes it
faster. Everything of the contract is imported from here; its data stands in `contract_data.py`, the
operations in `contract_ops.py`. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.core.contract_data import (
    Capabilities,
    Ctx,
    DecoderSpec,
    ExecutionPlan,
    Handle,
    Inputs,
    KVSpec,
    Lane,
    LayerSpec,
    Limits,
    MemoryInfo,
    ModelShape,
    PackedWeight,
    Probe,
    Program,
    SampleInputs,
    StepOut,
    Transfer,
    WeightSpec,
)
from octavo.core.contract_ops import Ops, fusion_stands, handle_of
from octavo.core.types import Batch

if TYPE_CHECKING:
    from octavo.core.instruments import Instruments

__all__ = [
    "API_VERSION",
    "Backend",
    "Capabilities",
    "Communicator",
    "Ctx",
    "DecoderSpec",
    "ExecutionPlan",
    "Handle",
    "Inputs",
    "KVSpec",
    "Lane",
    "LayerSpec",
    "Limits",
    "MemoryInfo",
    "ModelShape",
    "Ops",
    "PackedWeight",
    "Probe",
    "Program",
    "SampleInputs",
    "StepOut",
    "Transfer",
    "WeightSpec",
    "fusion_stands",
    "handle_of",
]

API_VERSION = (1, 3)
"""(major, minor) of this contract. A backend of the major before (they begin with 1), or of a newer minor,
loads with a warning; one of another major is refused."""


class Backend:
    """A hardware family. Subclass it, name it, probe for devices; override what can be faster.

    name: the backend's own name; device_types: the words `--device` takes for it; priority: higher
    is tried first by `--device auto`; negative is never chosen by it. api_version: the contract
    it is built for. pins_frees: for how many steps
    after a block was freed the device may still read it; so long nothing is written to it.
    """

    name: str = ""
    device_types: tuple[str, ...] = ()
    api_version: tuple[int, int] = API_VERSION
    priority: int = 0
    pins_frees: int = 0

    def probe(self) -> Probe:
        """Which devices there are, or why none. Imports nothing heavy."""
        return Probe(reason=f"backend {self.name!r} does not implement probe()")

    def torch_device(self, device: str) -> str:
        """The torch device of a device word: the part behind the colon if there is one."""
        return device.partition(":")[2] or "cpu"

    def capabilities(self, device: str) -> Capabilities:
        """What `device` can do."""
        return Capabilities()

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        """How to drive this model on this device. Pure: same arguments, same plan, no side effect."""
        return ExecutionPlan(
            block_size=limits.block_size or 16,
            lanes=(
                Lane(max_seqs=limits.max_num_seqs, max_tokens=limits.max_num_batched_tokens or 512),
            ),
            dtype=limits.dtype,
            kv_dtype=limits.kv_dtype,
            max_logits_rows=max(512, 2 * limits.max_num_seqs),
        )

    def memory(self, device: str) -> MemoryInfo:
        """Bytes in all and free, measured now."""
        from octavo.core import memory

        return memory.host_memory()

    def start(self, device: str, limits: Limits) -> None:
        """Called once in the process that will run the steps, before anything is allocated."""

    def ops(self, device: str) -> Ops:
        """The ops of one device."""
        ops = Ops()
        ops.device = self.torch_device(device)
        return ops

    def prepare(self, batch: Batch, prev: StepOut | None, device: str) -> Inputs:
        """Host arrays -> what the ops want, once per step and outside anything traced."""
        from octavo.core import ops

        return ops.prepare(batch, prev, self.torch_device(device))

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        """What the runner will call for this program; the default is the program's own function.

        It may have an attribute `compilations`: how many programs it has built so far.
        """
        return program.fn

    def instruments(self, device: str) -> Instruments | None:
        """What `octavo bench` measures a device with, or None."""
        return None

    def communicator(self, group: Any) -> Communicator:
        """Sets up a process group. Collectives themselves are ops."""
        return Communicator()


class Communicator:
    """A group of ranks. The default is the group of one. rank: this process's. size: how many there are."""

    rank: int = 0
    size: int = 1

    def close(self) -> None:
        """Leaves the group."""
