"""BERT, and RoBERTa and XLM-RoBERTa, which count positions from behind the padding token's id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.core.config import ConfigError
from octavo.core.contract import Ctx, ModelShape, Ops
from octavo.core.layers.encoder import Activation, EncoderLayer, LayerNorm
from octavo.core.layers.module import Embedding
from octavo.core.models.base import Model

if TYPE_CHECKING:
    import torch

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class Bert(Model):
    """The BERT encoder (Devlin et al. 2019), without the pooling layer behind it."""

    generates: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = True
    ignored_tensors = (
        "embeddings.position_ids",
        "embeddings.token_type_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
    )

    def __init__(self, config: Mapping[str, Any], shape: ModelShape, ops: Ops) -> None:
        act = _ACTIVATIONS.get(config.get("hidden_act", "gelu"))
        if act is None:
            raise ConfigError(
                f"hidden_act {config['hidden_act']!r} is not one of {', '.join(_ACTIVATIONS)}"
            )
        positions = config.get("position_embedding_type") or "absolute"
        if positions != "absolute":
            raise ConfigError(f"position_embedding_type {positions!r} is not implemented: absolute")
        if config.get("is_decoder"):
            raise ConfigError("is_decoder=true is not implemented: BERT runs as an encoder here")
        hidden, eps = shape.hidden_size, float(config.get("layer_norm_eps", 1e-12))
        if hidden % shape.q_heads:
            raise ConfigError(f"hidden_size {hidden} is no multiple of {shape.q_heads} heads")
        self._first = self.first_position(config)
        name = "embeddings"
        self.tokens = Embedding(ops, f"{name}.word_embeddings", shape.vocab_size, hidden)
        self.positions = Embedding(
            ops, f"{name}.position_embeddings", shape.max_position + self._first, hidden
        )
        types = int(config.get("type_vocab_size", 2))
        self.types = Embedding(ops, f"{name}.token_type_embeddings", types, hidden)
        self.norm = LayerNorm(ops, f"{name}.LayerNorm", hidden, eps)
        self.layers = [
            EncoderLayer(
                ops,
                f"encoder.layer.{i}",
                hidden=hidden,
                heads=shape.q_heads,
                intermediate=int(config["intermediate_size"]),
                act=act,
                eps=eps,
            )
            for i in range(shape.num_layers)
        ]

    @classmethod
    def first_position(cls, config: Mapping[str, Any]) -> int:
        """The row of the table of positions that the first token has."""
        return 0

    @classmethod
    def shape(cls, config: Mapping[str, Any], kv_dtype: str) -> ModelShape:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        layers, vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
        rows = int(config.get("max_position_embeddings", 512))
        inner = int(config["intermediate_size"])
        return ModelShape(
            architecture=cls.__name__,
            num_layers=layers,
            hidden_size=hidden,
            q_heads=heads,
            kv_heads=heads,
            head_size=hidden // heads,
            vocab_size=vocab,
            max_position=rows - cls.first_position(config),
            num_parameters=layers * hidden * (4 * hidden + 2 * inner) + (vocab + rows) * hidden,
            kv=(),
        )

    def hidden(self, ctx: Ctx) -> torch.Tensor:
        ids, positions = ctx.meta.token_ids, ctx.meta.positions
        x = self.tokens(ids, ctx) + self.positions(positions + self._first, ctx)
        x = x + self.types(ids[:1] * 0, ctx)  # all tokens are of the first type
        x = self.norm(x, ctx)
        for layer in self.layers:
            x = layer(x, ctx)
        return x


class Roberta(Bert):
    """RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2020)."""

    @classmethod
    def first_position(cls, config: Mapping[str, Any]) -> int:
        pad = config.get("pad_token_id")
        return 1 + (1 if pad is None else int(pad))
