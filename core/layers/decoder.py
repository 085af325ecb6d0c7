"""The decoder layer that most families share, and its halves: attention and a gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from octavo.core.contract import Ctx, DecoderSpec, LayerSpec, Ops, handle_of
from octavo.core.layers.module import Embedding, Head, Linear, Module, RMSNorm

if TYPE_CHECKING:
    import torch

DECODER_LAYER = "decoder_layer"
"""The fused op of a whole layer, as `Ops.fusions` names it."""

DECODER_LAYERS = "decoder_layers"
"""That of several layers."""

DECODER_LOGITS = "decoder_logits"
"""That of all from token ids to logits."""

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
        self.layer, self.group = layer, group
        self.q_heads, self.kv_heads = q_heads, kv_heads
        self.head_size = head_size
        self.rotary = rotary
        self.scale = head_size**-0.5 if scale is None else scale
        self.window, self.softcap = window, softcap
        sizes = [n * head_size for n in (q_heads, kv_heads, kv_heads)]
        parts = [(f"{name}.{p}_proj", size) for p, size in zip("qkv", sizes, strict=True)]
        self.qkv = Linear(ops, parts, hidden, qkv_bias)
        self.out = Linear(ops, [(f"{name}.o_proj", hidden)], q_heads * head_size, out_bias)

    def __call__(self, x: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        ops = self._ops
        heads = self.qkv(x, ctx).view(x.shape[0], -1, self.head_size)
        last_q = self.q_heads
        last_k = last_q + self.kv_heads
        q, k, v = heads[:, :last_q], heads[:, last_q:last_k], heads[:, last_k:]
        q, k = ops.rotary(q, k, ctx.weights[self.rotary], ctx.meta)
        written = ops.write_kv(ctx.kv[self.layer], k, v, ctx.meta, self.group)
        ctx.kv[self.layer] = handle_of("write_kv", written)
        mixed = ops.paged_attention(
            q,
            ctx.kv[self.layer],
            ctx.meta,
            scale=self.scale,
            group=self.group,
            window=self.window,
            softcap=self.softcap,
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
        self._act_and_mul, self.act = ops.act_and_mul, act
        self.intermediate = intermediate
        parts = [(f"{name}.gate_proj", intermediate), (f"{name}.up_proj", intermediate)]
        self.gate_up = Linear(ops, parts, hidden, bias, gated=True)
        self.down = Linear(ops, [(f"{name}.down_proj", hidden)], intermediate, bias)

    def __call__(self, x: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        return self.down(self._act_and_mul(self.gate_up(x, ctx), self.act), ctx)


class DecoderLayer(Module):
    """norm -> attention -> add and norm -> gated feed-forward (-> add, by the next layer's norm).

    `fused` is set when the ops run the whole layer as one call; it then takes and gives the residual
    stream, with both halves' results added.
    """

    def __init__(
        self, ops: Ops, norm_1: RMSNorm, attention: Attention, norm_2: RMSNorm, mlp: GatedMLP
    ) -> None:
        self.attention_norm, self.attention = norm_1, attention
        self.mlp_norm, self.mlp = norm_2, mlp
        self.spec = LayerSpec(
            layer=attention.layer,
            hidden=norm_1.size,
            intermediate=mlp.intermediate,
            q_heads=attention.q_heads,
            kv_heads=attention.kv_heads,
            head_size=attention.head_size,
            norm_1=norm_1.weight,
            norm_2=norm_2.weight,
            qkv=attention.qkv.weight,
            out=attention.out.weight,
            gate_up=mlp.gate_up.weight,
            down=mlp.down.weight,
            qkv_bias=attention.qkv.bias,
            out_bias=attention.out.bias,
            gate_up_bias=mlp.gate_up.bias,
            down_bias=mlp.down.bias,
            rotary=attention.rotary,
            eps=norm_1.eps,
            norm_offset=norm_1.offset,
            act=mlp.act,
            scale=attention.scale,
            window=attention.window,
            softcap=attention.softcap,
            group=attention.group,
        )
        same_norms = (norm_1.eps, norm_1.offset) == (norm_2.eps, norm_2.offset)
        self.fused = (
            ops.decoder_layer if same_norms and ops.fuses(DECODER_LAYER, self.spec) else None
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Ctx
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, x = x, self.attention_norm(x, ctx)
        else:
            x, residual = self.attention_norm.add(x, residual, ctx)
        x = self.attention(x, ctx)
        x, residual = self.mlp_norm.add(x, residual, ctx)
        return self.mlp(x, ctx), residual


class Decoder(Module):
    """The layers of a model and the norm after them, run as one call or layer by layer as the ops offer."""

    def __init__(self, ops: Ops, layers: Sequence[DecoderLayer], norm: RMSNorm) -> None:
        self.layers, self.norm = list(layers), norm
        self._specs = tuple(layer.spec for layer in self.layers)
        fused = [layer.fused for layer in self.layers if layer.fused is not None]
        self._fused = fused if len(fused) == len(self.layers) else []
        whole = self._fused and all(ops.fuses(DECODER_LAYERS, spec) for spec in self._specs)
        self._whole = ops.decoder_layers if whole else None

    def to_logits(
        self, ops: Ops, embedding: Embedding, head: Head
    ) -> Callable[[Ctx], torch.Tensor] | None:
        """What runs all from embedding to head as one call, or None where the ops do not."""
        if self._whole is None or not all(ops.fuses(DECODER_LOGITS, s) for s in self._specs):
            return None
        norm = self.norm
        names = (embedding.weight, norm.weight, head.weight)
        spec = DecoderSpec(self._specs, *names, eps=norm.eps, norm_offset=norm.offset)
        return partial(ops.decoder_logits, spec)

    def __call__(self, x: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        """The normed hidden states [T, hidden] after all layers, of embeddings x [T, hidden]."""
        if self._whole is not None:
            return self.norm(self._whole(x, self._specs, ctx), ctx)
        if self._fused:
            for fused, spec in zip(self._fused, self._specs, strict=True):
                x = fused(x, spec, ctx)
            return self.norm(x, ctx)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, ctx)
        assert residual is not None
        return self.norm.add(x, residual, ctx)[0]
