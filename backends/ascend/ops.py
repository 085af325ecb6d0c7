"""The operations of Ascend: torch-npu's fused calls where there are any, torch's on the device elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from octavo.backends.ascend.attention import Heads, compressed_mask, fused, paged
from octavo.backends.ascend.inputs import RESERVED, step_of
from octavo.backends.hccl import HcclCommunicator
from octavo.core import ops as portable
from octavo.core.ops import TorchInputs
from octavo.plugins import Handle, KVSpec, Ops, SampleInputs

KVPair = tuple[torch.Tensor, torch.Tensor]
"""A layer's keys and values, each [1 + blocks, 128, kv_heads, d]; the first block takes padding."""


class AscendOps(Ops):
    """One device's operations. `npu` is the module torch_npu."""

    def __init__(self, device: str, npu: Any, communicator: HcclCommunicator | None = None) -> None:
        self.device = device
        self._npu = npu
        self._communicator = communicator
        self._mask: torch.Tensor | None = None

    # ------------------------------------------------------------------------------- KV cache

    def alloc_kv(self, groups: Sequence[KVSpec], num_blocks: int, block_size: int) -> list[Handle]:
        by_layer: dict[int, KVPair] = {}
        for spec in groups:
            dtype = portable.DTYPES[spec.dtype]
            shape = (num_blocks + RESERVED, block_size, spec.kv_heads)
            for layer in spec.layers:
                by_layer[layer] = (
                    torch.zeros(*shape, spec.head_size, dtype=dtype, device=self.device),
                    torch.zeros(*shape, spec.head_size_v, dtype=dtype, device=self.device),
                )
        return [by_layer[layer] for layer in sorted(by_layer)]

    def write_kv(
        self, handle: KVPair, k: torch.Tensor, v: torch.Tensor, meta: TorchInputs, group: int = 0
    ) -> KVPair:
        new = (x.to(cache.dtype).contiguous() for x, cache in zip((k, v), handle, strict=True))
        self._npu._npu_reshape_and_cache(*new, *handle, meta.slots[group])
        return handle

    def copy_blocks(self, handles: list[KVPair], pairs: Sequence[tuple[int, int]]) -> list[KVPair]:
        moved = [(a + RESERVED, b + RESERVED) for a, b in pairs]
        return portable.copy_blocks(handles, moved)

    def export_blocks(self, handles: list[KVPair], ids: Sequence[int]) -> torch.Tensor:
        return portable.export_blocks(handles, [i + RESERVED for i in ids])

    def import_blocks(
        self, src: torch.Tensor, handles: list[KVPair], ids: Sequence[int]
    ) -> list[KVPair]:
        return portable.import_blocks(src, handles, [i + RESERVED for i in ids])

    # ------------------------------------------------------------------------------ attention

    def paged_attention(
        self,
        q: torch.Tensor,
        handle: KVPair,
        meta: TorchInputs,
        *,
        scale: float,
        group: int = 0,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step = step_of(meta)
        if softcap > 0:  # neither of the vendor's operations has it
            step.host_bound = True
            return portable.paged_attention(
                *(q, handle, meta),
                scale=scale,
                group=group,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        table = step.tables[group]
        heads = Heads(q.shape[1], handle[0].shape[2], scale)
        if step.decode and window == 0 and sinks is None:
            return paged(self._npu, q.contiguous(), handle, table, step, heads)
        if self._mask is None:
            self._mask = compressed_mask(self.device)
        rows = step.query_ends[-1]
        q_rows = q.narrow(0, 0, rows)
        out = fused(self._npu, q_rows, handle, table, step, heads, self._mask, window, sinks)
        if rows == len(q):
            return out
        return torch.cat((out, out.new_zeros(len(q) - rows, *out.shape[1:])))

    # -------------------------------------------------------------------- the rest of a layer

    def linear(
        self,
        x: torch.Tensor,
        weight: Any,
        *,
        bias: torch.Tensor | None = None,
        reduce: Literal["sum"] | None = None,
        lora: Any = None,
    ) -> torch.Tensor:
        out = super().linear(x, weight, bias=bias, reduce=None, lora=lora)
        if reduce == "sum" and self._communicator is not None:
            return self._communicator.all_reduce(out)
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
    ) -> torch.Tensor:
        gamma = weight + offset if offset else weight
        out: torch.Tensor = self._npu.npu_rms_norm(x, gamma, eps)[0]
        return out

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gamma = weight + offset if offset else weight
        out, _, total = self._npu.npu_add_rms_norm(x, residual, gamma, eps)
        return out, total

    def rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        meta: TorchInputs,
        *,
        interleaved: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made, key = step_of(meta).made, ("rotary", id(cos_sin), interleaved)
        if key not in made:
            at = cos_sin.index_select(0, meta.positions)
            both = at.unsqueeze(1).unsqueeze(0).chunk(2, dim=-1)
            if interleaved:
                made[key] = tuple(x.repeat_interleave(2, dim=-1) for x in both)
            else:
                made[key] = tuple(torch.cat((x, x), dim=-1) for x in both)
        cos, sin = made[key]  # [1, T, 1, R] float32
        size = cos.shape[-1]
        mode = "interleave" if interleaved else "half"

        def turned(x: torch.Tensor) -> torch.Tensor:
            # In float32, as the tables are: half precision loses far positions.
            rows = x.narrow(-1, 0, size).unsqueeze(0).float().contiguous()
            out: torch.Tensor = self._npu.npu_rotary_mul(rows, cos, sin, mode)
            out = out.squeeze(0).to(x.dtype)
            rest = x.shape[-1] - size
            return torch.cat((out, x.narrow(-1, size, rest)), dim=-1) if rest else out

        return turned(q), turned(k)

    def act_and_mul(
        self, x: torch.Tensor, kind: Literal["silu", "gelu", "gelu_tanh"]
    ) -> torch.Tensor:
        if kind != "silu":
            return super().act_and_mul(x, kind)
        out: torch.Tensor = self._npu.npu_swiglu(x, -1)
        return out

    # ------------------------------------------------------------------------------- sampling

    def sample(self, logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        """Greedy rows on the device. Seeded draws on the host, where a row at a time costs no launches;
        `npu_top_k_top_p` keeps other tokens where probabilities tie, and knows no min-p."""
        if rows.all_greedy:
            return super().sample(logits, rows)
        host = SampleInputs(
            *(t.cpu() for t in (rows.temperature, rows.top_k, rows.top_p, rows.min_p)),
            *(t.cpu() for t in (rows.seed, rows.counter)),
        )
        return super().sample(logits.cpu(), host).to(self.device)
