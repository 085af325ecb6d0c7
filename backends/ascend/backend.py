"""Huawei Ascend A2 and A3 through torch-npu: vendor attention over 128-token blocks, NPU graphs for decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.backends.ascend.vendor import device_nodes, vendor, why_absent
from octavo.backends.buckets import powers
from octavo.core.config import ConfigError
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
    Ops,
    Probe,
    Program,
    StepOut,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from octavo.backends.hccl import HcclCommunicator

BLOCK = 128
"""Tokens in a KV block: what the vendor's attention is laid out for."""

STEP = 128
"""Rows of a step with prompts come in multiples of these."""

GRAPH_ROWS = 256
"""Decode steps of more sequences run without graphs: launching them is not what takes the time."""

OPS = {
    "write_kv": "atb _npu_reshape_and_cache",
    "paged_attention": "npu_fused_infer_attention_score (TND); decode: atb _npu_paged_attention; sinks: "
    "npu_fused_infer_attention_score_v2; soft caps: portable torch",
    "rms_norm": "npu_rms_norm",
    "add_rms_norm": "npu_add_rms_norm",
    "rotary": "npu_rotary_mul",
    "act_and_mul": "npu_swiglu (gelu: torch)",
    "sample": "greedy: torch on the device; seeded: portable on the host",
    "every op": "torch on the device",
}


class AscendBackend(Backend):
    """`--device npu`, or `npu:1` for the second device."""

    name = "ascend"
    device_types = ("npu",)
    priority = 30

    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16",)  # the attention has no float32
    executed_on = "this machine's Ascend"
    execution = "device"

    def __init__(self) -> None:
        self._communicator: HcclCommunicator | None = None

    def probe(self) -> Probe:
        reason = why_absent()
        if reason is not None:
            return Probe(reason=reason)
        nodes = device_nodes()
        words = ("npu", *(f"npu:{i}" for i in range(1, len(nodes))))
        return Probe(devices=words, details={"nodes": ", ".join(nodes)})

    def torch_device(self, device: str) -> str:
        return device

    def capabilities(self, device: str) -> Capabilities:
        return Capabilities(
            dtypes=self.dtypes,
            native_dtypes=self.dtypes,
            kv_dtypes=self.dtypes,
            block_sizes=(BLOCK,),
            head_sizes=(16, 256, 16),
            shapes="dynamic",  # what is padded is padded for graphs alone
            graph_capture=True,
            swap=True,
            collectives=("all_reduce",),
            ops=OPS,
            notes={
                "executed on": self.executed_on,
                "execution": self.execution,
                "310P": "not offered: its cache has a fractal layout that this backend does not write",
            },
        )

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        tokens = limits.max_num_batched_tokens or max(2048, limits.max_num_seqs)
        small = powers(limits.max_num_seqs)
        large = range(STEP, max(tokens, small[-1]) + STEP, STEP)
        lane = Lane(
            max_seqs=limits.max_num_seqs,
            max_tokens=tokens,
            token_buckets=tuple(sorted({*small, *large})),
            block_buckets=powers(-(-limits.max_model_len // BLOCK)),
        )
        return ExecutionPlan(
            block_size=limits.block_size or BLOCK,
            lanes=(lane,),
            dtype=limits.dtype,
            kv_dtype=limits.kv_dtype,
            max_logits_rows=max(512, 2 * limits.max_num_seqs),
        )

    def memory(self, device: str) -> MemoryInfo:
        free, total = vendor().npu.mem_get_info()
        return MemoryInfo(total=total, free=free)

    def start(self, device: str, limits: Limits) -> None:
        if limits.kv_dtype != limits.dtype:
            raise ConfigError(
                f"--kv-cache-dtype {limits.kv_dtype} beside {limits.dtype} weights: Ascend's attention "
                "takes queries and cache of one dtype; leave it out"
            )
        npu = vendor().npu
        npu.set_device(int(device.partition(":")[2] or 0))
        chip = npu.get_device_name()
        if "310P" in chip:
            raise ConfigError(
                f"--device {device} is a {chip}, whose KV cache has a fractal layout that this backend "
                "does not offer; it runs Atlas A2 and A3. --device cpu runs here"
            )

    def ops(self, device: str) -> Ops:
        from octavo.backends.ascend.ops import AscendOps

        return AscendOps(self.torch_device(device), vendor(), self._communicator)

    def prepare(self, batch: Batch, prev: StepOut | None, device: str) -> Any:
        import torch

        from octavo.backends.ascend import inputs

        where = self.torch_device(device)

        def upload(array: np.ndarray[Any, Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(where, non_blocking=True, copy=True)

        made = inputs.prepare(batch, upload)
        if batch.token_src is not None and prev is not None and prev.tokens is not None:
            source = upload(batch.token_src).long()
            made.token_ids = torch.where(
                source >= 0, prev.tokens[source.clamp_min(0)], made.token_ids
            )
        return made

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        if program.kind != "forward":
            return program.fn
        from octavo.backends.ascend.graphs import GraphedForward

        return GraphedForward(program.fn, vendor(), GRAPH_ROWS)

    def communicator(self, group: Any) -> Communicator:
        if group is None or group.size == 1:
            return Communicator()
        from octavo.backends.hccl import HcclCommunicator

        vendor()  # torch has backend "hccl" from then on
        self._communicator = HcclCommunicator(group)
        return self._communicator
