"""What the runner asks of a model, and the registry of architectures."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.core.config import ConfigError
from octavo.core.contract import Ctx, Inputs, KVSpec, ModelShape, Ops
from octavo.core.layers.module import Module

if TYPE_CHECKING:
    import torch

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "octavo.core.models.llama:Llama",
    "MistralForCausalLM": "octavo.core.models.llama:Mistral",
    "Qwen2ForCausalLM": "octavo.core.models.llama:Qwen2",
    # Without a head: embedding models.
    "BertModel": "octavo.core.models.bert:Bert",
    "LlamaModel": "octavo.core.models.headless:LlamaModel",
    "MistralModel": "octavo.core.models.headless:MistralModel",
    "Qwen2Model": "octavo.core.models.headless:Qwen2Model",
    "RobertaModel": "octavo.core.models.bert:Roberta",
    "XLMRobertaModel": "octavo.core.models.bert:Roberta",
}
"""Hugging Face architecture name -> "module:class". Plug-ins add to a copy of it."""


class Model(Module):
    """Turns a batch's tokens into hidden states, and hidden states into logits.

    A subclass builds its parts in `__init__`. Names of weights are those of Hugging Face checkpoints.

    generates: whether there is a head, and so logits. bidirectional: whether positions see those behind
    them, too; such a model keeps no KV cache, and has its prompts whole.
    """

    generates: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = False

    ignored_tensors: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Ends of tensor names that a checkpoint may hold and nobody needs."""

    def __init__(self, config: Mapping[str, Any], shape: ModelShape, ops: Ops) -> None:
        raise NotImplementedError

    @classmethod
    def shape(cls, config: Mapping[str, Any], kv_dtype: str) -> ModelShape:
        """What a backend may know before weights are read."""
        raise NotImplementedError

    def tables(self, max_positions: int) -> dict[str, torch.Tensor]:
        """Computed constants that stand among the weights, such as rotary tables."""
        return {}

    def hidden(self, ctx: Ctx) -> torch.Tensor:
        """[T, hidden] for `ctx.meta.token_ids` [T]."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor, ctx: Ctx) -> torch.Tensor:
        """hidden [L, hidden] -> logits [L, vocabulary]. Not asked of a model that generates nothing."""
        raise NotImplementedError

    def step_logits(self, ctx: Ctx) -> torch.Tensor:
        """Logits [L, vocabulary] of the batch's `logits_rows`."""
        return self.logits(wanted(self.hidden(ctx), ctx.meta), ctx)


def wanted(hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The rows of hidden [T, H] whose logits are wanted."""
    rows = inputs.logits_rows
    return hidden if rows is None else hidden.index_select(0, rows)


def model_class(config: Mapping[str, Any], known: Mapping[str, str] = ARCHITECTURES) -> type[Model]:
    """The class for a config's architecture.

    Raises:
        ConfigError: an architecture that is not known, with the ones that are.
    """
    names = config.get("architectures") or []
    if isinstance(names, str):
        names = [names]
    for name in names:
        if name in known:
            module, _, attribute = known[name].partition(":")
            found: type[Model] = getattr(import_module(module), attribute)
            return found
    asked = ", ".join(map(str, names)) or f"none (model_type {config.get('model_type')!r})"
    raise ConfigError(
        f"architecture {asked} is not supported; supported: {', '.join(sorted(known))}"
    )


def full_attention_kv(layers: int, kv_heads: int, head_size: int, dtype: str) -> tuple[KVSpec, ...]:
    """One KV group in which every layer keeps all tokens."""
    return (KVSpec(tuple(range(layers)), kv_heads, head_size, head_size, dtype),)
