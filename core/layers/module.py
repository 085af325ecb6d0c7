"""What a model is made of: stateless parts that name their weights.

A part holds the ops it calls, bound once, and the names of its weights; the weights themselves
arrive in `Ctx` at every call, so a forward pass is a pure function of its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo.core.contract import Ctx, Ops, WeightSpec

if TYPE_CHECKING:
    import torch


class Module:
    """A part of a model. `specs()` lists the weights of this part and of all parts it holds."""

    def own_specs(self) -> list[WeightSpec]:
        return []

    def specs(self) -> Iterator[WeightSpec]:
        yield from self.own_specs()
        for value in self.__dict__.values():
            if isinstance(value, Module):
                yield from value.specs()
            elif isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, Module):
                        yield from item.specs()


class Linear(Module):
    """y = x · Wᵀ + b, with the rows of several checkpoint tensors stacked (fused QKV, gate and up).

    Args:
        parts: (checkpoint prefix, output size) in stacking order.
        in_features: input size.
        bias: whether every part has a bias.
        gated: whether the parts are gate and up, for `act_and_mul`.
    """

    def __init__(
        self,
        ops: Ops,
        parts: list[tuple[str, int]],
        in_features: int,
        bias: bool = False,
        gated: bool = False,
    ) -> None:
        self._linear = ops.linear
        self._gated = gated
        self._parts = parts
        self._in = in_features
        self.weight = "+".join(name for name, _ in parts) + ".weight"
        self.bias = "+".join(name for name, _ in parts) + ".bias" if bias else None

    def own_specs(self) -> list[WeightSpec]:
        weights = tuple((f"{name}.weight", (out, self._in)) for name, out in self._parts)
        specs = [WeightSpec(self.weight, "linear", weights, shard_axis=0, gated=self._gated)]
        if self.bias is not None:
            specs.append(
                WeightSpec(self.bias, "bias", tuple((f"{n}.bias", (o,)) for n, o in self._parts))
            )
        return specs

    def __call__(self, x: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        bias = ctx.weights[self.bias] if self.bias is not None else None
        return self._linear(x, ctx.weights[self.weight], bias=bias)


class RMSNorm(Module):
    """Root-mean-square norm (Zhang and Sennrich 2019), alone or after adding to the residual."""

    def __init__(self, ops: Ops, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        self._norm, self._add_norm = ops.rms_norm, ops.add_rms_norm
        self.weight = f"{name}.weight"
        self.size, self.eps, self.offset = size, eps, offset

    def own_specs(self) -> list[WeightSpec]:
        return [WeightSpec(self.weight, "norm", ((self.weight, (self.size,)),))]

    def __call__(self, x: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        return self._norm(x, ctx.weights[self.weight], self.eps, offset=self.offset)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, ctx: Ctx
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(residual + x), residual + x)."""
        return self._add_norm(x, residual, ctx.weights[self.weight], self.eps, offset=self.offset)


class Embedding(Module):
    """Token ids [T] -> rows [T, hidden]."""

    def __init__(self, ops: Ops, name: str, vocab_size: int, hidden: int) -> None:
        self._embedding = ops.embedding
        self.weight = f"{name}.weight"
        self._shape = (vocab_size, hidden)

    def own_specs(self) -> list[WeightSpec]:
        return [WeightSpec(self.weight, "embedding", ((self.weight, self._shape),), shard_axis=0)]

    def __call__(self, ids: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        return self._embedding(ids, ctx.weights[self.weight])


class Head(Module):
    """The language-model head: its own matrix, or the embedding's (tied)."""

    def __init__(
        self, ops: Ops, name: str, embedding: Embedding, vocab_size: int, hidden: int, tied: bool
    ) -> None:
        self._linear = ops.linear
        self.weight = f"{name}.weight"
        part = (embedding.weight if tied else self.weight, (vocab_size, hidden))
        self._spec = WeightSpec(
            self.weight, "head", (part,), shard_axis=0, alias=embedding.weight if tied else None
        )

    def own_specs(self) -> list[WeightSpec]:
        return [self._spec]

    def __call__(self, x: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        return self._linear(x, ctx.weights[self.weight])
