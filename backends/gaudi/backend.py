"""Intel Gaudi 2 and 3 through `habana_frameworks`: buckets of shapes, HPU graphs, blocks of 128 tokens."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from octavo.backends.buckets import powers
from octavo.backends.gaudi.vendor import PACKAGE, device_nodes, stand_in, vendor
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

    from octavo.backends.gaudi.inputs import GaudiInputs
    from octavo.backends.hccl import HcclCommunicator

BLOCK = 128
"""Tokens in a KV block: what the vendor's paged attention is laid out for."""

SHORTEST = 16
"""Tokens of the smallest bucket of a prompt."""

DTYPES = ("bfloat16", "float32")

OPS = {
    "write_kv": "index_copy_ into flat [tokens, kv_heads, d]",
    "paged_attention": "prompts: FusedSDPA (soft caps, sinks: torch); decode: flat paged attention with "
    "hpu.block_softmax and block_softmax_adjustment on Gaudi 3, torch on Gaudi 2 and for sinks",
    "rms_norm": "hpex FusedRMSNorm",
    "add_rms_norm": "torch add, hpex FusedRMSNorm",
    "rotary": "hpex apply_rotary_pos_emb",
    "sample": "greedy: torch on the device; seeded: portable on the host",
    "every op": "torch on the device",
}


class GaudiBackend(Backend):
    """`--device hpu`, or `hpu:1` for the second device."""

    name = "gaudi"
    device_types = ("hpu",)
    priority = 30

    def __init__(self) -> None:
        self._communicator: HcclCommunicator | None = None

    def probe(self) -> Probe:
        if find_spec(PACKAGE) is None:
            return Probe(
                reason=f"{PACKAGE} is not installed: it comes with Intel Gaudi's own torch "
                "(docs/backends/gaudi.md)"
            )
        if find_spec("torch") is None:
            return Probe(reason="torch is not installed")
        note = stand_in()
        if note is not None:
            return Probe(devices=("hpu",), details={"stand-in": note})
        nodes = device_nodes()
        if not nodes:
            return Probe(
                reason=f"{PACKAGE} is installed, but the driver shows no device (no /dev/accel/accel*): "
                "load habanalabs, or give the container its devices"
            )
        words = ("hpu", *(f"hpu:{i}" for i in range(1, len(nodes))))
        return Probe(devices=words, details={"nodes": ", ".join(nodes)})

    def torch_device(self, device: str) -> str:
        return device

    def capabilities(self, device: str) -> Capabilities:
        note = stand_in()
        return Capabilities(
            dtypes=DTYPES,
            native_dtypes=DTYPES,
            kv_dtypes=DTYPES,
            block_sizes=(BLOCK,),
            head_sizes=(8, 256, 8),
            shapes="bucketed",
            graph_capture=True,
            swap=True,
            collectives=("all_reduce",),
            ops=OPS,
            notes={
                "executed on": f"stand-in: {note}" if note else "this machine's Gaudi",
                "execution": "stand-in" if note else "device",
                "float32": "for checking; bfloat16 is what the chip is made for",
                "prompts with cached tokens": "gathered blocks and a mask, in one FusedSDPA",
            },
        )

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        tokens = limits.max_num_batched_tokens or 2048
        rows = max(512, 2 * limits.max_num_seqs)
        widths = powers(-(-limits.max_model_len // BLOCK))
        # One prompt a step, as the vendor's own engine has it: then its shape is its bucket.
        prompts = Lane(
            kinds=("prefill",),
            max_seqs=1,
            max_tokens=tokens,
            token_buckets=powers(tokens, SHORTEST),
            seq_buckets=(1,),
            block_buckets=widths,
            row_buckets=(1, rows),
            exclusive=True,
        )
        seqs = powers(limits.max_num_seqs)
        decodes = Lane(
            kinds=("decode",),
            max_seqs=limits.max_num_seqs,
            max_tokens=limits.max_num_seqs,
            token_buckets=seqs,
            seq_buckets=seqs,
            block_buckets=widths,
            row_buckets=seqs,
            exclusive=True,
        )
        return ExecutionPlan(
            block_size=limits.block_size or BLOCK,
            lanes=(prompts, decodes),
            dtype=limits.dtype,
            kv_dtype=limits.kv_dtype,
            max_logits_rows=rows,
        )

    def memory(self, device: str) -> MemoryInfo:
        free, total = _vendor().hpu.mem_get_info()
        return MemoryInfo(total=total, free=free)

    def start(self, device: str, limits: Limits) -> None:
        _vendor().hpu.set_device(int(device.partition(":")[2] or 0))

    def ops(self, device: str) -> Ops:
        from octavo.backends.gaudi.ops import GaudiOps

        return GaudiOps(device, _vendor(), self._communicator)

    def prepare(self, batch: Batch, prev: StepOut | None, device: str) -> GaudiInputs:
        import numpy as np
        import torch

        from octavo.backends.gaudi import inputs

        def upload(array: np.ndarray[Any, Any]) -> torch.Tensor:
            kind = np.int32 if array.dtype == np.int32 else np.int64
            return torch.from_numpy(np.array(array, kind)).to(device, non_blocking=True)

        made = inputs.prepare(batch, upload)
        if batch.token_src is not None and prev is not None and prev.tokens is not None:
            source = upload(batch.token_src.astype(np.int64))
            made.token_ids = torch.where(
                source >= 0, prev.tokens[source.clamp_min(0)], made.token_ids
            )
        return made

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        lib = _vendor()
        if program.kind != "forward":
            return program.fn
        from octavo.backends.gaudi.graphs import GraphedForward

        return GraphedForward(program.fn, lib, graphs=lib.lazy)

    def communicator(self, group: Any) -> Communicator:
        if group is None or group.size == 1:
            return Communicator()
        from importlib import import_module

        from octavo.backends.hccl import HcclCommunicator

        _vendor()
        import_module("habana_frameworks.torch.distributed.hccl")
        self._communicator = HcclCommunicator(group)
        return self._communicator


def _vendor() -> Any:
    try:
        return vendor()
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"--device hpu: importing {PACKAGE} failed: {error}. It must match this torch; see "
            "docs/backends/gaudi.md"
        ) from error
