"""The two halves of a decoder layer that most families share: attention and a gated feed-forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from octavo.core.contract import Ctx, Ops
from octavo.core.layers.module import Linear, Module

if TYPE_CHECKING:
    import torch

ROTARY = "rotary"
"""Prefix of the names under which cosine and sine tables stand among the weights."""


class Attention(Module):
    """Grouped-query attention over the paged KV cache, with rotary positions.

    Args:
        name: checkpoint prefix; layer: index of the KV handle; rotary: name of the rotary table.
        window: 0, or how many last positions a query sees. qkv_bias, out_bias: as the checkpoint has.
    """

    def __init__(
        self,
        ops: Ops,
        name: str,
        layer: int,
        *,
        hidden: int,
        q_heads: int,
        kv_heads: int,
        head_size: int,
        rotary: str = ROTARY,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        group: int = 0,
        qkv_bias: bool = False,
        out_bias: bool = False,
    ) -> None:
        self._ops = ops
        self._layer, self._group = layer, group
        self._q_heads, self._kv_heads = q_heads, kv_heads
        self._head_size = head_size
        self._rotary = rotary
        self._scale = head_size**-0.5 if scale is None else scale
        self._window, self._softcap = window, softcap
        sizes = [n * head_size for n in (q_heads, kv_heads, kv_heads)]
        parts = [(f"{name}.{p}_proj", size) for p, size in zip("qkv", sizes, strict=True)]
        self.qkv = Linear(ops, parts, hidden, qkv_bias)
        self.out = Linear(ops, [(f"{name}.o_proj", hidden)], q_heads * head_size, out_bias)

    def __call__(self, x: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        ops = self._ops
        heads = self.qkv(x, ctx).view(x.shape[0], -1, self._head_size)
        last_q = self._q_heads
        last_k = last_q + self._kv_heads
        q, k, v = heads[:, :last_q], heads[:, last_q:last_k], heads[:, last_k:]
        q, k = ops.rotary(q, k, ctx.weights[self._rotary], ctx.meta)
        ctx.kv[self._layer] = ops.write_kv(ctx.kv[self._layer], k, v, ctx.meta, self._group)
        mixed = ops.paged_attention(
            q,
            ctx.kv[self._layer],
            ctx.meta,
            scale=self._scale,
            group=self._group,
            window=self._window,
            softcap=self._softcap,
        )
        return self.out(mixed.flatten(1), ctx)


class GatedMLP(Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(
        self,
        ops: Ops,
        name: str,
        *,
        hidden: int,
        intermediate: int,
        act: Literal["silu", "gelu", "gelu_tanh"] = "silu",
        bias: bool = False,
    ) -> None:
        self._act_and_mul, self._act = ops.act_and_mul, act
        parts = [(f"{name}.gate_proj", intermediate), (f"{name}.up_proj", intermediate)]
        self.gate_up = Linear(ops, parts, hidden, bias)
        self.down = Linear(ops, [(f"{name}.down_proj", hidden)], intermediate, bias)

    def __call__(self, x: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        return self.down(self._act_and_mul(self.gate_up(x, ctx), self._act), ctx)
