"""Intel Gaudi 2 and 3 through `habana_frameworks`: buckets of shapes, HPU graphs, blocks of 128 tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.backends.buckets import powers
from octavo.backends.gaudi import vendor
from octavo.backends.vendor import BLOCK, Upload, VendorBackend
from octavo.plugins import Batch, ExecutionPlan, Lane, Limits, Ops, Program

if TYPE_CHECKING:
    from octavo.backends.gaudi.inputs import GaudiInputs

SHORTEST = 16
"""Tokens of the smallest bucket of a prompt."""


class GaudiBackend(VendorBackend):
    """`--device hpu`, or `hpu:1` for the second device."""

    name = "gaudi"
    device_types = ("hpu",)
    chip = "Gaudi"
    hccl = "habana_frameworks.torch.distributed.hccl"

    dtypes = ("bfloat16", "float32")
    head_sizes = (8, 256, 8)
    shapes = "bucketed"
    op_names: ClassVar[Mapping[str, str]] = {
        "write_kv": "index_copy_ into flat [tokens, kv_heads, d]",
        "paged_attention": "prompts: FusedSDPA (soft caps, sinks: torch); decode: flat paged attention with "
        "hpu.block_softmax and block_softmax_adjustment on Gaudi 3, torch on Gaudi 2 and for sinks",
        "rms_norm": "hpex FusedRMSNorm",
        "add_rms_norm": "torch add, hpex FusedRMSNorm",
        "rotary": "hpex apply_rotary_pos_emb",
    }
    notes: ClassVar[Mapping[str, str]] = {
        "float32": "for checking; bfloat16 is what the chip is made for",
        "prompts with cached tokens": "gathered blocks and a mask, in one FusedSDPA",
    }

    def why_absent(self) -> str | None:
        return vendor.why_absent()

    def device_nodes(self) -> list[str]:
        return vendor.device_nodes()

    def stand_in(self) -> str | None:
        return vendor.stand_in()

    def module(self) -> Any:
        return vendor.vendor().hpu

    def lanes(self, limits: Limits) -> tuple[Lane, ...]:
        tokens = limits.max_num_batched_tokens or 2048
        widths = powers(-(-limits.max_model_len // BLOCK))
        # One prompt a step, as the vendor's own engine has it: then its shape is its bucket.
        prompts = Lane(
            kinds=("prefill",),
            max_seqs=1,
            max_tokens=tokens,
            token_buckets=powers(tokens, SHORTEST),
            seq_buckets=(1,),
            block_buckets=widths,
            row_buckets=(1, max(512, 2 * limits.max_num_seqs)),
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
        return prompts, decodes

    def ops(self, device: str) -> Ops:
        from octavo.backends.gaudi.ops import GaudiOps

        return GaudiOps(device, vendor.vendor(), self._communicator)

    def inputs(self, batch: Batch, upload: Upload) -> GaudiInputs:
        from octavo.backends.gaudi.inputs import prepare

        return prepare(batch, upload)

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        lib = vendor.vendor()
        if program.kind != "forward":
            return program.fn
        from octavo.backends.gaudi.graphs import GraphedForward

        return GraphedForward(program.fn, lib)
