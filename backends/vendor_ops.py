"""The operations that backends over a vendor's package have in common (`octavo.backends.vendor`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from octavo.backends.hccl import HcclCommunicator
from octavo.core import ops as portable
from octavo.plugins import KVSpec, Ops, SampleInputs


class VendorOps(Ops):
    """One device's operations. A subclass says which of them are the vendor's, and how they are called."""

    def __init__(self, device: str, communicator: HcclCommunicator | None = None) -> None:
        self.device = device
        self._communicator = communicator

    def made(self, meta: Any) -> dict[Any, Any]:
        """What the layers of a step share, by key; goes with the step."""
        raise NotImplementedError

    def turn(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        """x [T, H, R] rotated, in any dtype; cos, sin [T, 1, R] float32, a number for each of x."""
        raise NotImplementedError

    def zeroed_kv(
        self, groups: Sequence[KVSpec], num_blocks: int, block_size: int
    ) -> list[portable.KVPair]:
        """Keys and values of each layer, in layer order: [blocks, block, kv_heads, d], of zeros."""
        pairs: list[portable.KVPair] = portable.alloc_kv(
            self.device, groups, num_blocks, block_size
        )
        for pair in pairs:
            for side in pair:
                side.zero_()
        return pairs

    def linear(
        self,
        x: torch.Tensor,
        weight: Any,
        *,
        bias: torch.Tensor | None = None,
        reduce: Literal["sum"] | None = None,
        lora: Any = None,
    ) -> torch.Tensor:
        return self.reduced(super().linear(x, weight, bias=bias, reduce=None, lora=lora), reduce)

    def reduced(self, partial: torch.Tensor, reduce: Literal["sum"] | None) -> torch.Tensor:
        """A product of `linear`, summed over the ranks if that is asked for."""
        if reduce == "sum" and self._communicator is not None:
            return self._communicator.all_reduce(partial)
        return partial

    def rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        meta: Any,
        *,
        interleaved: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made, key = self.made(meta), ("rotary", id(cos_sin), interleaved)
        if key not in made:
            both = cos_sin.index_select(0, meta.positions).unsqueeze(1).chunk(2, dim=-1)
            if interleaved:
                cos, sin = (x.repeat_interleave(2, dim=-1) for x in both)
            else:
                cos, sin = (torch.cat((x, x), dim=-1) for x in both)
            # Held as long as the key: no other table can have its id meanwhile.
            made[key] = cos_sin, cos, sin
        _, cos, sin = made[key]
        size = cos.shape[-1]

        def turned(x: torch.Tensor) -> torch.Tensor:
            # Not by indexing, which torch-npu takes to the driver even where tensors hold no data.
            out = self.turn(x.narrow(-1, 0, size), cos, sin, interleaved).to(x.dtype)
            rest = x.shape[-1] - size
            return torch.cat((out, x.narrow(-1, size, rest)), dim=-1) if rest else out

        return turned(q), turned(k)

    def sample(self, logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        """Greedy rows on the device. Seeded draws on the host, where a row at a time costs no launches, and
        64-bit integers, from which their bits come, are whole."""
        if rows.all_greedy:
            return super().sample(logits, rows)
        host = SampleInputs(
            *(t.cpu() for t in (rows.temperature, rows.top_k, rows.top_p, rows.min_p)),
            *(t.cpu() for t in (rows.seed, rows.counter)),
        )
        return super().sample(logits.cpu(), host).to(self.device)
