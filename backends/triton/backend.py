"""NVIDIA and AMD GPUs: the Triton kernels of `octavo.kernels.triton` behind the contract.

`--device cuda:interpret` runs the same kernels in Triton's interpreter on the CPU: slow and for checks
only, never chosen by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from octavo.backends.triton import found
from octavo.core.config import ConfigError
from octavo.kernels.triton.tiles import AMD, ARCHS, INTERPRET, NVIDIA, fallback_arch, widest_head
from octavo.plugins import (
    Backend,
    Batch,
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
    from octavo.backends.triton.inputs import TritonInputs

KERNEL_OPS = (
    "write_kv",
    "copy_blocks",
    "export_blocks",
    "import_blocks",
    "paged_attention",
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "act_and_mul",
    "sample",
    "token_logprobs",
)
"""Ops that Triton kernels run."""

LOGITS_BYTES = 256 << 20
"""What the logits of a step may take, unless there are more sequences to draw for."""

BLOCK_SIZES = (16, 32, 64, 128, 256)


class TritonBackend(Backend):
    """`--device cuda`, `--device rocm` and, for checks, `--device cuda:interpret`; one object each."""

    name = "triton"

    def __init__(self, word: str) -> None:
        self.device_types = (word,)
        self.interpret = word == "cuda:interpret"
        self.priority = -1 if self.interpret else 20
        self._longest: int | None = (
            None  # tokens of a sequence, of the engine that was started last
        )

    def probe(self) -> Probe:
        built = found.torch_build()
        if self.interpret:
            if find_spec("triton") is None:
                return Probe(reason="triton is not installed: pip install 'octavo[triton]'")
            if not built:
                return Probe(reason="torch is not installed")
            return Probe(
                devices=("cuda:interpret",),
                details={"runs": "the GPU kernels on the CPU, interpreted: for checks, slow"},
            )
        if self.device_types == ("rocm",):
            gpus, kind = found.amd_gpus(), "hip"
            absent = "no AMD GPU: no /dev/kfd with a GPU behind it"
        else:
            gpus, kind = found.nvidia_gpus(), "cuda"
            absent = "no NVIDIA GPU: neither /dev/nvidia0 nor /dev/dxg"
        if not gpus:
            return Probe(reason=absent)
        if reason := found.missing(kind, built):
            return Probe(reason=reason)
        word = self.device_types[0]
        return Probe(
            devices=tuple(f"{word}:{i}" for i in range(len(gpus))),
            details={
                "gpus": ", ".join(name or node for node, name in gpus.items()),
                "torch": built,
            },
        )

    def torch_device(self, device: str) -> str:
        if self.interpret:
            return "cpu"
        return f"cuda:{device.partition(':')[2] or 0}"  # torch calls AMD's GPUs cuda, too

    def arch(self, device: str) -> str:
        """ "sm_90", "gfx942", … of a device; loads torch, and its driver with it."""
        if self.interpret:
            return INTERPRET
        import torch

        from octavo.kernels.triton.runtime import arch_of

        return arch_of(torch.device("cuda", self._index(device)))

    def _index(self, device: str) -> int:
        """The GPU's index. Raises ConfigError: torch cannot use it."""
        import torch

        text = device.partition(":")[2] or "0"
        if not torch.cuda.is_available():
            raise ConfigError(
                f"--device {device!r}: torch {torch.__version__} finds no GPU it can use; check the "
                "driver, CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, and that torch is built for it"
            )
        count = torch.cuda.device_count()
        if not text.isdecimal() or int(text) >= count:
            word = self.device_types[0]
            there = ", ".join(f"{word}:{i}" for i in range(count))
            raise ConfigError(f"--device {device!r}: there is {there}")
        return int(text)

    def capabilities(self, device: str) -> Capabilities:
        arch = self.arch(device)
        dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
        if self.interpret:
            # Its bfloat16 arithmetic is silently wrong.
            dtypes = ("float32", "float16")
        how = "triton, interpreted" if self.interpret else f"triton {arch}"
        known = arch in ARCHS or self.interpret
        return Capabilities(
            dtypes=dtypes,
            native_dtypes=dtypes,
            # gfx11 lacks registers for taking 8-bit codes apart (`kv_cache.takes_fp8`).
            kv_dtypes=dtypes if fallback_arch(arch) == "gfx1100" else (*dtypes, "fp8"),
            kv_follows_dtype=True,
            block_sizes=BLOCK_SIZES,
            head_sizes=(1, widest_head(arch, "bfloat16"), 1),
            shapes="bucketed",  # any will do; decode steps are captured at the start
            graph_capture=not self.interpret,
            swap=True,
            encoders=True,
            quantization=("int8", "int4"),
            batch_invariant=False,
            ops=dict.fromkeys(KERNEL_OPS, how) | {"every op": "torch"},
            notes={
                "quantised products": "portable torch",
                "execution": "interpreted" if self.interpret else "device",
                "arch": arch if known else f"{arch}, with the tiles of {fallback_arch(arch)}",
                "decode": "steps of one token per sequence run as graphs, captured at the start"
                if not self.interpret
                else "padded to buckets as graphs are, but interpreted",
            },
        )

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        usual = 512 if self.interpret else 4096
        tokens = limits.max_num_batched_tokens or max(usual, limits.max_num_seqs)
        return ExecutionPlan(
            block_size=limits.block_size or 16,
            # Any size of step will do: decode steps are padded to their graphs' buckets in `compile`.
            lanes=(Lane(max_seqs=limits.max_num_seqs, max_tokens=tokens),),
            dtype=limits.dtype,
            kv_dtype=limits.kv_dtype,
            max_logits_rows=max(
                2 * limits.max_num_seqs, min(512, LOGITS_BYTES // (4 * model.vocab_size))
            ),
        )

    def memory(self, device: str) -> MemoryInfo:
        if self.interpret:
            return super().memory(device)
        import torch

        index = self._index(device)
        free, total = torch.cuda.mem_get_info(index)
        held = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        return MemoryInfo(total=total, free=free + held)

    def start(self, device: str, limits: Limits) -> None:
        self._longest = limits.max_model_len
        if self.interpret:
            _start_interpreter(device)
            return
        import torch

        index = self._index(device)
        arch = self.arch(device)
        if arch.startswith("sm_") and int(arch[3:]) < 80:
            raise ConfigError(
                f"--device {device!r}: {torch.cuda.get_device_name(index)} is {arch}; the kernels are "
                f"for {NVIDIA[0]} and later. Use --device reference:cuda, or cpu"
            )
        if arch.startswith("gfx") and not arch.startswith(
            ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
        ):
            raise ConfigError(
                f"--device {device!r}: {torch.cuda.get_device_name(index)} is {arch}; the kernels are "
                f"for {', '.join(AMD)} and their relatives. Use --device reference:cuda, or cpu"
            )
        torch.cuda.set_device(index)

    def ops(self, device: str) -> Ops:
        from octavo.backends.triton.ops import TritonOps

        return TritonOps(self.torch_device(device))

    def prepare(self, batch: Batch, prev: StepOut | None, device: str) -> TritonInputs:
        from octavo.backends.triton.inputs import TritonInputs

        return TritonInputs(batch, prev, self.torch_device(device))

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        """The forward pass with decode steps as graphs; other programs as they are."""
        if program.kind != "forward":
            return program.fn
        from octavo.backends.triton.graphs import DecodeGraphs

        blocks = -(-self._longest // plan.block_size) if self._longest else None
        seqs = max(lane.max_seqs for lane in plan.lanes)
        return DecodeGraphs(program.fn, seqs, self.torch_device(device), blocks)


def _start_interpreter(device: str) -> None:
    # Triton reads this when kernels are decorated: before anything of it is imported.
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    from octavo.kernels.triton.runtime import interpreted

    if not interpreted():
        raise ConfigError(
            f"--device {device!r}: this process has already loaded triton for compiling; use a new one"
        )
