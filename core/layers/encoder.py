"""The encoder layer of BERT and its kin: attention to all positions, norms behind the sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from octavo.core.contract import Ctx, Ops, WeightSpec
from octavo.core.layers.module import Linear, Module

if TYPE_CHECKING:
    import torch

Activation = Literal["gelu", "gelu_tanh", "relu"]


class LayerNorm(Module):
    """Layer norm (Ba, Kiros and Hinton 2016) with weight and bias."""

    def __init__(self, ops: Ops, name: str, size: int, eps: float) -> None:
        self._norm = ops.layer_norm
        self.weight, self.bias = f"{name}.weight", f"{name}.bias"
        self._size, self._eps = size, eps

    def own_specs(self) -> list[WeightSpec]:
        size = (self._size,)
        return [
            WeightSpec(self.weight, "norm", ((self.weight, size),)),
            WeightSpec(self.bias, "bias", ((self.bias, size),)),
        ]

    def __call__(self, x: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        return self._norm(x, ctx.weights[self.weight], ctx.weights[self.bias], self._eps)


class EncoderLayer(Module):
    """norm(x + attention(x)), then norm(y + down(act(up(y)))): BERT's (Devlin et al. 2019), whose tensor
    names it has behind `name`."""

    def __init__(
        self,
        ops: Ops,
        name: str,
        *,
        hidden: int,
        heads: int,
        intermediate: int,
        act: Activation,
        eps: float,
    ) -> None:
        self._attend, self._activation = ops.encoder_attention, ops.activation
        self._heads, self._size, self._act = heads, hidden // heads, act
        self._scale = self._size**-0.5
        attention = f"{name}.attention"
        parts = [(f"{attention}.self.{part}", hidden) for part in ("query", "key", "value")]
        self.qkv = Linear(ops, parts, hidden, bias=True)
        self.out = Linear(ops, [(f"{attention}.output.dense", hidden)], hidden, bias=True)
        self.attention_norm = LayerNorm(ops, f"{attention}.output.LayerNorm", hidden, eps)
        self.up = Linear(ops, [(f"{name}.intermediate.dense", intermediate)], hidden, bias=True)
        self.down = Linear(ops, [(f"{name}.output.dense", hidden)], intermediate, bias=True)
        self.norm = LayerNorm(ops, f"{name}.output.LayerNorm", hidden, eps)

    def __call__(self, x: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        heads = self.qkv(x, ctx).view(x.shape[0], 3, self._heads, self._size)
        q, k, v = heads.unbind(1)
        mixed = self._attend(q, k, v, ctx.meta, scale=self._scale).flatten(1)
        x = self.attention_norm(x + self.out(mixed, ctx), ctx)
        inner = self._activation(self.up(x, ctx), self._act)
        return self.norm(x + self.down(inner, ctx), ctx)
