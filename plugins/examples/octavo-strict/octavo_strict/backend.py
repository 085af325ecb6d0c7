"""The backend: what the chip can do, how it wants to be driven, and what it makes of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
    Program,
    StepOut,
)
from octavo_strict import chip

if TYPE_CHECKING:
    from octavo_strict.inputs import StrictInputs
    from octavo_strict.program import WarmUp


class StrictBackend(Backend):
    """The backend of `--device strict`."""

    name = "strict"
    device_types = ("strict",)
    priority = -1  # only when asked for
    pins_frees = chip.RESTS

    def __init__(self) -> None:
        self._warm_up: WarmUp | None = None

    def probe(self) -> Probe:
        return Probe(devices=("strict",), details={"made of": "the CPU, and rules"})

    def capabilities(self, device: str) -> Capabilities:
        dtypes = ("float32", "bfloat16")
        checked = "torch, bounds-checked"
        own = ("write_kv", "copy_blocks", "export_blocks", "import_blocks", "paged_attention")
        return Capabilities(
            dtypes=dtypes,
            native_dtypes=dtypes,
            kv_dtypes=dtypes,
            block_sizes=(chip.BLOCK,),
            head_sizes=(2, 256, 2),
            shapes="static",
            swap=True,
            logits_dtype="bfloat16",
            notes={"execution": "stand-in"},
            ops=dict.fromkeys(own, checked) | {"every op": "portable torch, shapes checked"},
        )

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        tokens = min(limits.max_num_batched_tokens or 256, chip.PROMPT_TOKENS[-1])
        tokens = max(chip.CHUNK, tokens // chip.CHUNK * chip.CHUNK)
        blocks = chip.cut(chip.BLOCKS, -(-limits.max_model_len // chip.BLOCK))
        prompts = Lane(
            ("prefill",),
            max_seqs=min(limits.max_num_seqs, chip.PROMPT_SEQS[-1]),
            max_tokens=tokens,
            chunk_multiple=chip.CHUNK,
            token_buckets=chip.cut(chip.PROMPT_TOKENS, tokens),
            seq_buckets=chip.PROMPT_SEQS,
            block_buckets=blocks,
            row_buckets=chip.PROMPT_ROWS,
            exclusive=True,
        )
        seqs = min(limits.max_num_seqs, chip.DECODE[-1])
        sizes = chip.cut(chip.DECODE, seqs)
        decode = Lane(
            ("decode",),
            max_seqs=seqs,
            max_tokens=seqs,
            token_buckets=sizes,
            seq_buckets=sizes,
            block_buckets=blocks,
            row_buckets=sizes,
            exclusive=True,
        )
        return ExecutionPlan(
            chip.BLOCK,
            (prompts, decode),
            limits.dtype,
            limits.kv_dtype,
            max_logits_rows=chip.PROMPT_ROWS[-1],
        )

    def ops(self, device: str) -> Ops:
        from octavo_strict.ops import StrictOps

        return StrictOps()

    def prepare(self, batch: Batch, prev: StepOut | None, device: str) -> StrictInputs:
        from octavo_strict.inputs import upload

        return upload(batch)

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        from octavo_strict.program import Draw, Forward, WarmUp

        if program.kind == "forward":
            self._warm_up = WarmUp()
            return Forward(program, plan, self._warm_up)
        if program.kind == "sample" and self._warm_up is not None:
            return Draw(program, self._warm_up)
        return program.fn
