"""CPUs: the C++ kernels of `octavo.kernels.cpu` behind the contract.

Without compiled kernels (no compiler at install) the portable ops run, and capabilities, `octavo devices
cpu` and the start-up banner say so.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.plugins import (
    Backend,
    Batch,
    Capabilities,
    ExecutionPlan,
    Inputs,
    Instruments,
    Lane,
    Limits,
    ModelShape,
    Ops,
    Probe,
    Program,
    StepOut,
)

if TYPE_CHECKING:
    from types import ModuleType

    from octavo.backends.cpu.providers import Provider
    from octavo.core.ops import TorchInputs

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
    "linear",
    "embedding",
    "decoder_layer",
    "decoder_layers",
    "decoder_logits",
    "sample",
    "mask_logits",
    "best_allowed",
    "token_logprobs",
)
"""Ops that the C++ library runs."""

TORCH_OPS = ("encoder_attention", "layer_norm", "activation")
"""Ops of encoders, which torch runs."""

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATION = ("int8", "int4")
KEPT_CODES = ("codes8", "codes4")

LOGITS_BYTES = 32 << 20
"""What the logits of a step may take, unless there are more sequences to draw for."""


def kernels() -> ModuleType:
    from octavo.kernels import cpu

    return cpu


@cache
def cpu_flags() -> frozenset[str]:
    """The CPU's feature flags as Linux names them; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def native_dtypes() -> tuple[str, ...]:
    """Dtypes whose matrix products this CPU has instructions for."""
    flags = cpu_flags()
    found = ["float32"]
    if flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        found.append("bfloat16")
    if flags & {"avx512_fp16", "amx_fp16", "asimdhp"}:
        found.append("float16")
    return tuple(found)


class CpuBackend(Backend):
    """`--device cpu`: Intel, AMD, ARM and POWER."""

    name = "cpu"
    device_types = ("cpu",)
    priority = 10

    def __init__(self) -> None:
        self._provider: Provider | None = None  # of the engine that was started last

    def probe(self) -> Probe:
        if find_spec("torch") is None:
            return Probe(reason="torch is not installed")
        lib = kernels()
        return Probe(
            devices=("cpu",),
            details={
                "machine": platform.machine(),
                "cores": str(lib.core_count()),
                "kernels": f"c++ {lib.isa()}"
                if lib.available()
                else f"portable: {lib.why_unavailable()}",
            },
        )

    def torch_device(self, device: str) -> str:
        return "cpu"

    def capabilities(self, device: str) -> Capabilities:
        lib = kernels()
        if not lib.available():
            return Capabilities(
                dtypes=DTYPES,
                native_dtypes=native_dtypes(),
                kv_dtypes=DTYPES,
                swap=True,
                encoders=True,
                quantization=QUANTIZATION,
                ops={"every op": "portable torch"},
                notes={
                    "kernels": f"not compiled: {lib.why_unavailable()}; install with a C++ compiler for speed"
                },
            )
        from octavo.backends.cpu import providers

        return Capabilities(
            dtypes=DTYPES,
            native_dtypes=DTYPES,  # of weights: arithmetic is float32
            kv_dtypes=(*DTYPES, "int8"),
            block_sizes=tuple(range(lib.BLOCK_MULTIPLE, 257, lib.BLOCK_MULTIPLE)),
            head_sizes=(lib.HEAD_MULTIPLE, 256, lib.HEAD_MULTIPLE),
            swap=True,
            batch_invariant=True,
            encoders=True,
            quantization=QUANTIZATION,
            kept_codes=() if self._provider else KEPT_CODES,  # whose products other libraries lack
            ops=dict.fromkeys(KERNEL_OPS, f"c++ {lib.isa()}")
            | dict.fromkeys(TORCH_OPS, "portable torch")
            | ({"linear": self._provider.name} if self._provider else {}),
            notes={
                "kernels": f"{lib.isa()} of {', '.join(lib.isas())}",
                "threads": lib.threading(),
                "providers": providers.status(
                    lib.core_count() if lib.threads() == 1 else lib.threads()
                ),
            },
        )

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        tokens = limits.max_num_batched_tokens or max(512, limits.max_num_seqs)
        return ExecutionPlan(
            block_size=limits.block_size or 16,
            lanes=(Lane(max_seqs=limits.max_num_seqs, max_tokens=tokens),),
            dtype=limits.dtype,
            kv_dtype=limits.kv_dtype,
            # Prompt logprobs come in chunks of these; what a row costs is its logits.
            max_logits_rows=max(
                2 * limits.max_num_seqs, min(512, LOGITS_BYTES // (4 * model.vocab_size))
            ),
        )

    def start(self, device: str, limits: Limits) -> None:
        import torch

        lib = kernels()
        threads = limits.threads or lib.core_count()
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if lib.available():
            lib.set_threads(threads)
        self._provider = self._chosen(limits, threads)

    def _chosen(self, limits: Limits, threads: int) -> Provider | None:
        # Other libraries' products neither keep a row's bits apart from its company, nor know formats.
        if limits.op_providers == "none" or limits.batch_invariant or not kernels().available():
            return None
        from octavo.backends.cpu import providers

        if limits.op_providers == "measure":
            providers.measure(threads)
        found = providers.choose(threads)
        return found if found is not None and found.path.format == limits.dtype else None

    def prepare(self, batch: Batch, prev: StepOut | None, device: str) -> Inputs:
        inputs: TorchInputs = super().prepare(batch, prev, device)
        if batch.kind == "decode" and batch.num_rows == len(batch.token_ids):
            inputs.logits_rows = None  # gathering all rows in order would copy them
        return inputs

    def instruments(self, device: str) -> Instruments | None:
        if not kernels().available():
            return None
        from octavo.backends.cpu.instruments import CpuInstruments

        return CpuInstruments()

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        """Keeps torch's own threads out of a step: what little torch does there is not worth a second
        pool that spins on the cores of the first. What it does for an encoder is."""
        import torch

        if program.kind == "embed" and program.model.bidirectional:
            return program.fn

        def run(*args: Any) -> Any:
            before = torch.get_num_threads()
            if before == 1:
                return program.fn(*args)
            torch.set_num_threads(1)
            try:
                return program.fn(*args)
            finally:
                torch.set_num_threads(before)

        return run if kernels().available() else program.fn

    def ops(self, device: str) -> Ops:
        if not kernels().available():
            return super().ops(device)
        from octavo.backends.cpu.ops import CpuOps

        return CpuOps(self._provider)
