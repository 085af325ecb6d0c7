"""Llama 2 and 3 (rope scalings, tied embeddings, biases), SmolLM2, and their near kin Mistral (sliding
window) and Qwen2 (biases on q, k and v)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError
from octavo.core.contract import Ctx, ModelShape, Ops
from octavo.core.layers.decoder import ROTARY, Attention, Decoder, DecoderLayer, GatedMLP
from octavo.core.layers.module import Embedding, Head, RMSNorm
from octavo.core.layers.rotary import rope_parameters, rotary_table
from octavo.core.models.base import Model, full_attention_kv

if TYPE_CHECKING:
    import torch

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


class Llama(Model):
    """The Llama architecture."""

    prefix = "model."
    _to_logits: Callable[[Ctx], torch.Tensor] | None = None

    def __init__(self, config: Mapping[str, Any], shape: ModelShape, ops: Ops) -> None:
        act = _ACTIVATIONS.get(config.get("hidden_act", "silu"))
        if act is None:
            raise ConfigError(
                f"hidden_act {config['hidden_act']!r} is not one of {', '.join(_ACTIVATIONS)}"
            )
        self._shape = shape
        self._rope = rope_parameters(config)
        hidden, eps, name = shape.hidden_size, float(config.get("rms_norm_eps", 1e-6)), self.prefix
        qkv_bias, out_bias = self.attention_biases(config)
        self.embedding = Embedding(ops, f"{name}embed_tokens", shape.vocab_size, hidden)
        layers = [
            DecoderLayer(
                ops,
                RMSNorm(ops, f"{name}layers.{i}.input_layernorm", hidden, eps),
                Attention(
                    ops,
                    f"{name}layers.{i}.self_attn",
                    i,
                    hidden=hidden,
                    q_heads=shape.q_heads,
                    kv_heads=shape.kv_heads,
                    head_size=shape.head_size,
                    window=self.window(config, i),
                    qkv_bias=qkv_bias,
                    out_bias=out_bias,
                ),
                RMSNorm(ops, f"{name}layers.{i}.post_attention_layernorm", hidden, eps),
                GatedMLP(
                    ops,
                    f"{name}layers.{i}.mlp",
                    hidden=hidden,
                    intermediate=int(config["intermediate_size"]),
                    act=act,  # type: ignore[arg-type]  # mypy widens the table's literals
                    bias=bool(config.get("mlp_bias", False)),
                ),
            )
            for i in range(shape.num_layers)
        ]
        self.decoder = Decoder(ops, layers, RMSNorm(ops, f"{name}norm", hidden, eps))
        if not self.generates:
            return
        tied = bool(config.get("tie_word_embeddings", False))
        self.head = Head(ops, "lm_head", self.embedding, shape.vocab_size, hidden, tied)
        cls = type(self)
        if (cls.hidden, cls.logits) == (Llama.hidden, Llama.logits):  # else it is not all there is
            self._to_logits = self.decoder.to_logits(ops, self.embedding, self.head)

    def attention_biases(self, config: Mapping[str, Any]) -> tuple[bool, bool]:
        """Whether q, k and v, and whether the output projection, have biases."""
        bias = bool(config.get("attention_bias", False))
        return bias, bias

    def window(self, config: Mapping[str, Any], layer: int) -> int:
        """How many last positions layer `layer` sees; 0 for all."""
        return 0

    @classmethod
    def shape(cls, config: Mapping[str, Any], kv_dtype: str) -> ModelShape:
        hidden, q_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or q_heads)
        head_size = int(config.get("head_dim") or hidden // q_heads)
        layers, vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
        attention = hidden * head_size * (2 * q_heads + 2 * kv_heads)
        parameters = (
            layers * (attention + 3 * hidden * int(config["intermediate_size"])) + vocab * hidden
        )
        if cls.generates and not config.get("tie_word_embeddings", False):
            parameters += vocab * hidden
        return ModelShape(
            architecture=cls.__name__,
            num_layers=layers,
            hidden_size=hidden,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_size=head_size,
            vocab_size=vocab,
            max_position=int(config.get("max_position_embeddings", 2048)),
            num_parameters=parameters,
            kv=full_attention_kv(layers, kv_heads, head_size, kv_dtype),
        )

    def tables(self, max_positions: int) -> dict[str, torch.Tensor]:
        return {ROTARY: rotary_table(self._rope, self._shape.head_size, max_positions)}

    def hidden(self, ctx: Ctx) -> torch.Tensor:
        x = self.embedding(ctx.meta.token_ids, ctx)
        return self.decoder(x, ctx)

    def logits(self, hidden: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        return self.head(hidden, ctx)

    def step_logits(self, ctx: Ctx) -> torch.Tensor:
        return super().step_logits(ctx) if self._to_logits is None else self._to_logits(ctx)


class Mistral(Llama):
    """Llama with a sliding window in every layer when the config names one."""

    def window(self, config: Mapping[str, Any], layer: int) -> int:
        return int(config.get("sliding_window") or 0)


class Qwen2(Llama):
    """Llama with biases on q, k and v, and a window in the layers that the config's types name."""

    def attention_biases(self, config: Mapping[str, Any]) -> tuple[bool, bool]:
        return True, False

    def window(self, config: Mapping[str, Any], layer: int) -> int:
        size = int(config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
        types = config.get("layer_types")
        if types is not None:
            return size if types[layer] == "sliding_attention" else 0
        return size if layer >= int(config.get("max_window_layers", 0)) else 0
