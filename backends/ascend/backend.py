"""Huawei Ascend A2 and A3 through torch-npu: vendor attention over 128-token blocks, NPU graphs for decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.backends.ascend import vendor
from octavo.backends.buckets import powers
from octavo.backends.vendor import BLOCK, Upload, VendorBackend
from octavo.core.config import ConfigError
from octavo.plugins import Batch, ExecutionPlan, Lane, Limits, Ops, Program

if TYPE_CHECKING:
    from octavo.core.ops import TorchInputs

STEP = 128
"""Rows of a step with prompts come in multiples of these."""

GRAPH_ROWS = 256
"""Decode steps of more sequences run without graphs: launching them is not what takes the time."""


class AscendBackend(VendorBackend):
    """`--device npu`, or `npu:1` for the second device."""

    name = "ascend"
    device_types = ("npu",)
    chip = "Ascend"

    dtypes = ("bfloat16",)  # the attention has no float32
    kv_equals_dtype = True
    head_sizes = (16, 256, 16)
    shapes = "dynamic"  # what is padded is padded for graphs alone
    op_names: ClassVar[Mapping[str, str]] = {
        "write_kv": "atb _npu_reshape_and_cache",
        "paged_attention": "npu_fused_infer_attention_score (TND); decode: atb _npu_paged_attention; sinks: "
        "npu_fused_infer_attention_score_v2; soft caps: portable torch",
        "rms_norm": "npu_rms_norm",
        "add_rms_norm": "npu_add_rms_norm",
        "rotary": "npu_rotary_mul",
        "act_and_mul": "npu_swiglu (gelu: torch)",
    }
    notes: ClassVar[Mapping[str, str]] = {
        "310P": "not offered: its cache has a fractal layout that this backend does not write",
    }

    def why_absent(self) -> str | None:
        return vendor.why_absent()

    def device_nodes(self) -> list[str]:
        return vendor.device_nodes()

    def module(self) -> Any:
        return vendor.vendor().npu

    def lanes(self, limits: Limits) -> tuple[Lane, ...]:
        tokens = limits.max_num_batched_tokens or max(2048, limits.max_num_seqs)
        small = powers(limits.max_num_seqs)
        large = range(STEP, max(tokens, small[-1]) + STEP, STEP)
        lane = Lane(
            max_seqs=limits.max_num_seqs,
            max_tokens=tokens,
            token_buckets=tuple(sorted({*small, *large})),
            block_buckets=powers(-(-limits.max_model_len // BLOCK)),
        )
        return (lane,)

    def start(self, device: str, limits: Limits) -> None:
        super().start(device, limits)
        chip = self.module().get_device_name()
        if "310P" in chip:
            raise ConfigError(
                f"--device {device} is a {chip}, whose KV cache has a fractal layout that this backend "
                "does not offer; it runs Atlas A2 and A3. --device cpu runs here"
            )

    def ops(self, device: str) -> Ops:
        from octavo.backends.ascend.ops import AscendOps

        return AscendOps(self.torch_device(device), vendor.vendor(), self._communicator)

    def inputs(self, batch: Batch, upload: Upload) -> TorchInputs:
        from octavo.backends.ascend.inputs import prepare

        return prepare(batch, upload)

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        if program.kind != "forward":
            return program.fn
        from octavo.backends.ascend.graphs import GraphedForward

        return GraphedForward(program.fn, vendor.vendor(), GRAPH_ROWS)
