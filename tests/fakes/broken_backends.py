"""Backends that are wrong in one way each, and an awkward one that is right. Importing it imports no torch:
the operations are in `broken_ops`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.plugins import (
    Backend,
    Batch,
    Capabilities,
    ExecutionPlan,
    Lane,
    Limits,
    ModelShape,
    Ops,
    Probe,
)


class Sound(Backend):
    """Nothing is wrong with it. `ops_class` names a class of `broken_ops`."""

    name = "sound"
    device_types = ("sound",)
    priority = -1
    ops_class = "Ops"

    def probe(self) -> Probe:
        return Probe(devices=("sound",))

    def capabilities(self, device: str) -> Capabilities:
        return Capabilities(
            block_sizes=(16,),
            quantization=("int4",),
            kept_codes=("codes8", "codes4"),
            swap=True,
            encoders=True,
        )

    def ops(self, device: str) -> Ops:
        import broken_ops

        made: Ops = getattr(broken_ops, self.ops_class)()
        return made


def with_ops(name: str) -> Sound:
    """A backend with the ops of this name."""
    made = Sound()
    made.ops_class = name
    return made


class HeavyProbe(Sound):
    def probe(self) -> Probe:
        import torch

        return Probe(devices=("sound",), details={"torch": torch.__version__})


class ProbeThatRaises(Sound):
    def probe(self) -> Probe:
        raise OSError("no driver")


class ImpurePlan(Sound):
    """Each plan has one row of logits more."""

    def __init__(self) -> None:
        self.plans = 0

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        self.plans += 1
        plan = super().plan(model, device, limits)
        return replace(plan, max_logits_rows=plan.max_logits_rows + self.plans)


class PlanThatKeepsTheModel(Sound):
    model: Any = None

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        self.model = model
        return super().plan(model, device, limits)


class PlanThatSetsTorch(Sound):
    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        import torch

        torch.rand(1)
        return super().plan(model, device, limits)


class PlanThatDoesNotListen(Sound):
    """Makes blocks of 16, whatever was asked for and declared."""

    def capabilities(self, device: str) -> Capabilities:
        return replace(super().capabilities(device), block_sizes=(16, 32))

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        return replace(super().plan(model, device, limits), block_size=16)


class ChangingCapabilities(Sound):
    def __init__(self) -> None:
        self.asked = 0

    def capabilities(self, device: str) -> Capabilities:
        self.asked += 1
        return replace(super().capabilities(device), notes={"asked": str(self.asked)})


class UnknownPlace(Sound):
    """Says that it ran where nothing runs."""

    def capabilities(self, device: str) -> Capabilities:
        return replace(super().capabilities(device), notes={"execution": "somewhere"})


class ClaimsAKernel(Sound):
    """Says that a kernel runs what the portable op runs."""

    def capabilities(self, device: str) -> Capabilities:
        return replace(super().capabilities(device), ops={"linear": "handwritten"})


class DeclaresTooMuch(Sound):
    """Says that it has float16, which its linear op refuses."""

    ops_class = "NoHalf"

    def capabilities(self, device: str) -> Capabilities:
        return replace(super().capabilities(device), dtypes=("float32", "float16"))


class DeclaresUnknownWords(Sound):
    """Right, but for words that Octavo does not know."""

    def capabilities(self, device: str) -> Capabilities:
        return replace(
            super().capabilities(device), dtypes=("float32", "fp16"), quantization=("int4", "fp8")
        )


class WithoutSwap(Sound):
    """Right, and its blocks stay where they are."""

    def capabilities(self, device: str) -> Capabilities:
        return replace(super().capabilities(device), swap=False)


class MemoryFromNowhere(Sound):
    def memory(self, device: str) -> Any:
        return replace(super().memory(device), total=1)


class AnotherContract(Sound):
    api_version = (7, 0)


class OneDtype(Sound):
    """Right; weights and cache are of one dtype."""

    def capabilities(self, device: str) -> Capabilities:
        both = ("float32", "bfloat16")
        return replace(
            super().capabilities(device), dtypes=both, kv_dtypes=both, kv_equals_dtype=True
        )


class NoCacheForADtype(OneDtype):
    def capabilities(self, device: str) -> Capabilities:
        return replace(super().capabilities(device), kv_dtypes=("float32",))


class TokensFromTheWrongEnd(Sound):
    """Right in every op; the program it compiles for drawing takes the least likely token."""

    def compile(self, program: Any, plan: ExecutionPlan, device: str) -> Any:
        if program.kind != "sample":
            return program.fn
        return lambda logits, rows: logits.argmin(-1)


class KeepsTheBatch(Sound):
    """Right in every op; a step's inputs are those of the step before."""

    def __init__(self) -> None:
        self.ready: Any = None

    def compile(self, program: Any, plan: ExecutionPlan, device: str) -> Any:
        if program.kind != "forward":
            return program.fn

        def forward(weights: Any, kv: Any, inputs: Any) -> Any:
            before, self.ready = self.ready, inputs.positions.clone()
            if before is not None and len(before) == len(inputs.positions):
                inputs.positions = before
            return program.fn(weights, kv, inputs)

        return forward


class CompiledOnly(Sound):
    """Nothing of it ran here but the engine."""

    ops_class = "NoHalf"

    def capabilities(self, device: str) -> Capabilities:
        notes = {"execution": "interpreted; linear: compiled; rms_norm: stand-in"}
        return replace(super().capabilities(device), notes=notes)


class EightBitCache(Sound):
    """Has a cache of 8-bit floats alone."""

    ops_class = "KeepsEightBits"

    def capabilities(self, device: str) -> Capabilities:
        return replace(super().capabilities(device), kv_dtypes=("fp8",))


class SaysInvariant(Sound):
    """Promises the same bits in any company, which its ops keep or not. `limits`: of the last start."""

    limits: Limits

    def capabilities(self, device: str) -> Capabilities:
        return replace(super().capabilities(device), batch_invariant=True, quantization=())

    def start(self, device: str, limits: Limits) -> None:
        self.limits = limits


class Interpreted(Sound):
    """Right, where each program takes its time."""

    def capabilities(self, device: str) -> Capabilities:
        return replace(super().capabilities(device), notes={"execution": "interpreted"})


class Awkward(Sound):
    """Right, in buckets, with handles that an operation consumes."""

    name = "awkward"
    device_types = ("awkward",)
    ops_class = "Donating"

    def capabilities(self, device: str) -> Capabilities:
        return Capabilities(
            block_sizes=(32,),
            head_sizes=(32, 128, 32),
            shapes="static",
            seeded_sampling=False,
            swap=True,
        )

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        lane = Lane(
            max_seqs=8, max_tokens=64, chunk_multiple=4, token_buckets=(8, 64), seq_buckets=(4, 8),
            block_buckets=(4, 32),
        )  # fmt: skip
        return ExecutionPlan(32, (lane,), limits.dtype, limits.kv_dtype, max_logits_rows=12)

    def prepare(self, batch: Batch, prev: Any, device: str) -> Any:
        assert len(batch.token_ids) in (8, 64) and len(batch.context_lens) in (4, 8)
        return super().prepare(batch, prev, device)


class TwoLanes(Sound):
    """Right: prompts whole in a lane of their own, decoding sequences in another, rows in buckets."""

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        rows = {"row_buckets": (4, 16), "exclusive": True, "block_buckets": (8, 40)}
        lanes = (
            Lane(("prefill",), 4, 128, token_buckets=(32, 128), seq_buckets=(2, 4), chunked=False, **rows),
            Lane(("decode",), 8, 8, token_buckets=(4, 8), seq_buckets=(4, 8), **rows),
        )  # fmt: skip
        return ExecutionPlan(16, lanes, limits.dtype, limits.kv_dtype, max_logits_rows=16)
