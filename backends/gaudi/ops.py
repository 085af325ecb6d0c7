"""The operations of Gaudi: the vendor's fused calls where there are any, torch's on the device elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from octavo.backends.gaudi import fp8
from octavo.backends.gaudi.attention import GaudiKV, Scoring, decode_attention, prompt_attention
from octavo.backends.gaudi.inputs import RESERVED, GaudiInputs
from octavo.backends.gaudi.vendor import Vendor
from octavo.backends.hccl import HcclCommunicator
from octavo.backends.vendor_ops import VendorOps
from octavo.core import ops as portable
from octavo.plugins import Handle, KVSpec, QuantizedTensor, WeightSpec


class GaudiOps(VendorOps):
    """One device's operations. The cache is written in place and may be named in captured graphs."""

    def __init__(
        self, device: str, lib: Vendor, communicator: HcclCommunicator | None = None
    ) -> None:
        super().__init__(device, communicator)
        self._lib = lib

    # ------------------------------------------------------------------------------- KV cache

    def alloc_kv(self, groups: Sequence[KVSpec], num_blocks: int, block_size: int) -> list[Handle]:
        group_of = {layer: i for i, spec in enumerate(groups) for layer in spec.layers}
        pairs = self.zeroed_kv(groups, num_blocks + RESERVED, block_size)
        return [
            GaudiKV(k.flatten(0, 1), v.flatten(0, 1), group_of[layer])
            for layer, (k, v) in zip(sorted(group_of), pairs, strict=True)
        ]

    def write_kv(
        self,
        handle: GaudiKV,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: GaudiInputs,
        group: int = 0,
    ) -> GaudiKV:
        part = meta.groups[group]
        if part.begun is not None:
            clear_blocks(handle, part.begun)
        for cache, new in ((handle.k, k), (handle.v, v)):
            cache.index_copy_(0, part.slots, new.to(cache.dtype))
        meta.written = [(handle, k, v)]
        return handle

    def copy_blocks(
        self, handles: list[GaudiKV], pairs: Sequence[tuple[int, int]]
    ) -> list[GaudiKV]:
        for source, target in pairs:  # in order: a target may be a later source
            at, to = (self._index([block]) for block in (source, target))
            for handle in handles:
                for cache in handle.blocks:
                    cache.index_copy_(0, to, cache.index_select(0, at))
        self._lib.mark_step()
        return handles

    def export_blocks(self, handles: list[GaudiKV], ids: Sequence[int]) -> torch.Tensor:
        at = self._index(ids)
        parts = [
            cache.index_select(0, at).cpu().flatten(1).view(torch.uint8)
            for handle in handles
            for cache in handle.blocks
        ]
        return torch.cat(parts, dim=1)

    def import_blocks(
        self, src: torch.Tensor, handles: list[GaudiKV], ids: Sequence[int]
    ) -> list[GaudiKV]:
        at, offset = self._index(ids), 0
        for handle in handles:
            for cache in handle.blocks:
                size = math.prod(cache.shape[1:]) * cache.element_size()
                part = src[:, offset : offset + size].contiguous().view(cache.dtype)
                part = part.view(len(ids), *cache.shape[1:])
                cache.index_copy_(0, at, part.to(self.device))
                offset += size
        self._lib.mark_step()
        return handles

    def _index(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([i + RESERVED for i in ids], dtype=torch.int64).to(self.device)

    # ------------------------------------------------------------------------------ attention

    def paged_attention(
        self,
        q: torch.Tensor,
        handle: GaudiKV,
        meta: GaudiInputs,
        *,
        scale: float,
        group: int = 0,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        part = meta.groups[group]
        how = Scoring(scale, window, softcap, sinks)
        fresh = next(((k, v) for cache, k, v in meta.written if cache is handle), None)
        found: list[torch.Tensor] = []
        if part.decode is not None:
            rows = q if part.decode.rows is None else q.index_select(0, part.decode.rows)
            found.append(decode_attention(rows, handle, part.decode, meta, how, self._lib))
        if part.prompts is not None:
            found.append(prompt_attention(q, handle, part.prompts, meta, how, self._lib, fresh))
        out = found[0] if len(found) == 1 else torch.cat(found)
        return out if meta.restore is None else out.index_select(0, meta.restore)

    # -------------------------------------------------------------------- the rest of a layer

    def pack_weight(
        self, parts: Mapping[str, torch.Tensor | QuantizedTensor], spec: WeightSpec, dtype: str
    ) -> Any:
        if spec.scheme != "fp8":
            return super().pack_weight(parts, spec, dtype)
        floats = [part for name, _ in spec.parts if isinstance(part := parts[name], torch.Tensor)]
        return fp8.pack(torch.cat(floats), self.device, portable.DTYPES[dtype])

    def linear(
        self,
        x: torch.Tensor,
        weight: Any,
        *,
        bias: torch.Tensor | None = None,
        reduce: Literal["sum"] | None = None,
        lora: Any = None,
    ) -> torch.Tensor:
        if not isinstance(weight, fp8.Fp8Weight):
            return super().linear(x, weight, bias=bias, reduce=reduce, lora=lora)
        return self.reduced(fp8.linear(x, weight, bias), reduce)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
    ) -> torch.Tensor:
        gamma = weight + offset if offset else weight
        # The kernel wants three dimensions and one dtype.
        out: torch.Tensor = self._lib.fused_rms_norm(x.unsqueeze(0), gamma.to(x.dtype), eps)
        return out.squeeze(0)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + x
        return self.rms_norm(residual, weight, eps, offset=offset), residual

    def made(self, meta: GaudiInputs) -> dict[Any, Any]:
        return meta.made

    def turn(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        modes = self._lib.rotary_modes
        mode = modes.PAIRWISE if interleaved else modes.BLOCKWISE
        # The tables are float32, and so is what the kernel makes of them.
        out: torch.Tensor = self._lib.apply_rotary(x, cos, sin, None, 0, mode)
        return out


def clear_blocks(handle: GaudiKV, blocks: torch.Tensor) -> None:
    """Zeroes blocks [n] that are about to be written: attention reads them whole, and what their last owner
    left there may not be finite."""
    for cache in handle.blocks:
        cache.index_fill_(0, blocks, 0)
