"""The operations of Ascend: torch-npu's fused calls where there are any, torch's on the device elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from octavo.backends.ascend.attention import Heads, compressed_mask, fused, paged
from octavo.backends.ascend.inputs import RESERVED, step_of
from octavo.backends.hccl import HcclCommunicator
from octavo.backends.vendor_ops import VendorOps
from octavo.core import ops as portable
from octavo.core.ops import KVPair, TorchInputs
from octavo.plugins import Handle, KVSpec


class AscendOps(VendorOps):
    """One device's operations. `npu` is the module torch_npu. A layer's keys and values are [1 + blocks, 128,
    kv_heads, d] each; the first block takes padding."""

    def __init__(self, device: str, npu: Any, communicator: HcclCommunicator | None = None) -> None:
        super().__init__(device, communicator)
        self._npu = npu
        self._mask: torch.Tensor | None = None

    # ------------------------------------------------------------------------------- KV cache

    def alloc_kv(self, groups: Sequence[KVSpec], num_blocks: int, block_size: int) -> list[Handle]:
        return [*self.zeroed_kv(groups, num_blocks + RESERVED, block_size)]

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

    def made(self, meta: TorchInputs) -> dict[Any, Any]:
        return step_of(meta).made

    def turn(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        # In float32, as the tables are: half precision loses far positions. Four dimensions are wanted.
        rows = x.unsqueeze(0).float().contiguous()
        tables = (cos.unsqueeze(0), sin.unsqueeze(0))
        out: torch.Tensor = self._npu.npu_rotary_mul(
            rows, *tables, "interleave" if interleaved else "half"
        )
        return out.squeeze(0)

    def act_and_mul(
        self, x: torch.Tensor, kind: Literal["silu", "gelu", "gelu_tanh"]
    ) -> torch.Tensor:
        if kind != "silu":
            return super().act_and_mul(x, kind)
        out: torch.Tensor = self._npu.npu_swiglu(x, -1)
        return out
