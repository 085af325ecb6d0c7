"""TPUs through torch_xla, and its CPU device, on which the same programs run for real without a TPU.

Shapes are static: a step is padded to a bucket of `plan()`, and each bucket is one XLA program, compiled once.
The KV cache is a value: a step takes it and returns the next, in the same memory (donated buffers).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.plugins import (
    Backend,
    Capabilities,
    ExecutionPlan,
    Lane,
    Limits,
    MemoryInfo,
    ModelShape,
    Ops,
    Probe,
    Program,
    StepOut,
)

if TYPE_CHECKING:
    from octavo.core.types import Batch

DTYPES = ("float32", "bfloat16")
INSTALL = "pip install 'octavo[xla]'"
TABLE_BYTES = 256 << 10
"""What a step's block tables may take: a TPU's kernel reads them from its scalar memory."""
SMALLEST = 16
"""Tokens in the smallest bucket, and what buckets are multiples of: rows of a 16-bit register."""
FOR_CHECKING = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""XLA's flags on its CPU device: programs compiled in a third of the time, each in one piece."""
KEPT = 320
"""Programs that torch_xla keeps there. A step's takes about 100 mappings of memory, of which Linux gives a process 65,530
(vm.max_map_count): neither the 2048 that it would keep nor half of them fit."""
STAND_INS = 8
"""Most devices that PJRT's CPU is asked to be."""
MOST_ROWS = 128
"""Rows of logits for which the largest prompt step has room, beside two for each sequence."""


def unusable() -> str:
    """Why torch_xla cannot be used here, or nothing. Imports neither it nor torch."""
    for package in ("torch", "torch_xla", "jax"):
        if find_spec(package) is None:
            return f"{package} is not installed: {INSTALL}"
    bridge, torch = (metadata.version(p) for p in ("torch_xla", "torch"))
    if bridge.split(".")[:2] != torch.split(".")[:2]:
        return (
            f"torch_xla {bridge} needs torch {'.'.join(bridge.split('.')[:2])}, here is {torch}: "
            f"{INSTALL} in an environment of its own"
        )
    return ""


def tpu_nodes() -> list[str]:
    """The device files of this machine's TPUs."""
    found = sorted(Path("/dev").glob("accel[0-9]*"))
    if not found and find_spec("libtpu") is not None:
        found = sorted(Path("/dev/vfio").glob("[0-9]*"))
    return [str(path) for path in found]


def chips_of(device: str) -> int:
    """How many chips a device word asks for: `tpu:x4` four as one, `tpu` one.

    Raises:
        ValueError: what is behind the last `:x` is no number of at least 1.
    """
    _, several, count = device.rpartition(":x")
    if not several:
        return 1
    if not count.isdigit() or int(count) < 1:
        raise ValueError(f"{device!r} asks for {count!r} chips; it may ask for 2, 4, …")
    return int(count)


def words(name: str, chips: int) -> tuple[str, ...]:
    """The device words for one chip and for 2, 4, … of so many, as one."""
    counts = [1]
    while 2 * counts[-1] <= chips:
        counts.append(2 * counts[-1])
    return tuple(name if count == 1 else f"{name}:x{count}" for count in counts)


def buckets(largest: int, smallest: int = SMALLEST) -> tuple[int, ...]:
    """Doubling sizes up to `largest`, which is rounded up to a multiple of the smallest."""
    sizes = [smallest]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], -(-largest // smallest) * smallest))
    return tuple(sizes)


class XlaBackend(Backend):
    """`--device xla:cpu`: every step of a TPU but its kernels, on a machine without one."""

    name = "xla"
    device_types = ("xla",)
    priority = -1  # never chosen by itself: `cpu` is faster
    kind = "CPU"
    attention = "plain XLA"
    several = "xla:cpu"  # the word to which a number of chips is added

    def probe(self) -> Probe:
        if reason := unusable():
            return Probe(reason=reason)
        details = {p: metadata.version(p) for p in ("torch_xla", "jax")}
        return Probe(devices=words("xla:cpu", STAND_INS), details=details)

    def torch_device(self, device: str) -> str:
        return "xla:0"

    def capabilities(self, device: str) -> Capabilities:
        kernels = ("write_kv", "paged_attention")
        return Capabilities(
            dtypes=DTYPES,
            native_dtypes=DTYPES if self.kind == "TPU" else ("float32",),
            kv_dtypes=DTYPES,
            block_sizes=(8, 16, 32, 64, 128, 256),
            head_sizes=(1, 256, 1),
            shapes="static",
            graph_capture=True,
            swap=True,
            seeded_sampling=True,
            ops={"every op": "XLA"} | dict.fromkeys(kernels, self.attention),
            notes={
                "step": "one XLA program per bucket, all compiled at the start",
                "several chips": f"as one, one program over all: {self.several}:x2, :x4, …",
                "ran on": "PJRT CPU; the kernels are compiled for TPU v4, v5e, v5p and v6e, never executed",
                **({} if self.kind == "TPU" else {"execution": f"stand-in (PJRT {self.kind})"}),
            },
        )

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        chips = chips_of(device)
        decodes = buckets(limits.max_num_seqs)
        seqs = decodes[-1]
        block = limits.block_size or 16
        while limits.block_size is None and block < 256:
            if seqs * (-(-limits.max_model_len // block) + 1) * 4 <= TABLE_BYTES:
                break
            block *= 2
        tokens = limits.max_num_batched_tokens or max(512, limits.max_num_seqs)
        rows = max(2 * seqs, MOST_ROWS)
        # Work follows the true lengths, so one size of tables serves all.
        tables = (-(-limits.max_model_len // block) + 1,)
        return ExecutionPlan(
            block_size=block,
            lanes=(
                Lane(
                    kinds=("prefill",),
                    max_tokens=tokens,
                    token_buckets=buckets(tokens),
                    row_buckets=(SMALLEST, rows),
                    max_seqs=limits.max_num_seqs,
                    seq_buckets=(seqs,),
                    block_buckets=tables,
                    exclusive=True,
                ),
                # A query of each sequence: attention works on one at a time, where prompts have many.
                Lane(
                    kinds=("decode",),
                    max_tokens=limits.max_num_seqs,
                    token_buckets=decodes,
                    row_buckets=decodes,
                    max_seqs=limits.max_num_seqs,
                    seq_buckets=(seqs,),
                    block_buckets=tables,
                    exclusive=True,
                ),
            ),
            dtype=limits.dtype,
            kv_dtype=limits.kv_dtype,
            layout="ranks" if chips == 1 else "spmd",
            world_size=chips,
            max_logits_rows=rows,
        )

    def start(self, device: str, limits: Limits) -> None:
        # torch_xla looks for this while it is imported, and guesses, aloud, where it is not set.
        os.environ.setdefault("PJRT_DEVICE", self.kind)
        if self.kind == "CPU":
            os.environ.setdefault("XLA_FLAGS", FOR_CHECKING)
            os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", str(KEPT))
        if (chips := chips_of(device)) > 1:
            if self.kind == "CPU":
                os.environ.setdefault("CPU_NUM_DEVICES", str(chips))
            # Of every program it says that another partitioner will follow this one.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        from octavo.backends.xla import bridge

        bridge.start(self.kind, exact=limits.dtype == "float32", chips=chips)

    def ops(self, device: str) -> Ops:
        from octavo.backends.xla.ops import XlaOps

        return XlaOps(self.kind, chips=chips_of(device))

    def prepare(self, batch: Batch, prev: StepOut | None, device: str) -> Any:
        from octavo.backends.xla.inputs import StepInputs

        return StepInputs(batch)

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        from octavo.backends.xla.programs import Forward, Sample

        if program.kind == "forward":
            return Forward(program.fn)
        if program.kind == "sample":
            return Sample(program.fn)
        return program.fn


class TpuBackend(XlaBackend):
    """`--device tpu`: one TPU chip of this machine."""

    name = "tpu"
    device_types = ("tpu",)
    priority = 30
    kind = "TPU"
    attention = "Pallas"
    several = "tpu"

    def probe(self) -> Probe:
        found = super().probe()
        if not found.devices:
            return found
        if not (nodes := tpu_nodes()):
            return Probe(reason="this machine has no TPU (no /dev/accel* or /dev/vfio/*)")
        if find_spec("libtpu") is None:
            return Probe(reason="libtpu is not installed: pip install 'torch_xla[tpu]'")
        details = {**found.details, "chips": str(len(nodes))}
        return Probe(devices=words("tpu", len(nodes)), details=details)

    def memory(self, device: str) -> MemoryInfo:
        from octavo.backends.xla import bridge

        known = bridge.memory()
        if known is None:
            return super().memory(device)
        total, used = known  # of one chip: the others hold as much
        return MemoryInfo(total=total * chips_of(device), free=(total - used) * chips_of(device))
