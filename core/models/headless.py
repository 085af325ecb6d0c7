"""Decoders saved without a head, as embedding models are: the same layers under names without `model.`."""

from __future__ import annotations

from octavo.core.models.llama import Llama, Mistral, Qwen2


class LlamaModel(Llama):
    """Llama without a head."""

    prefix = ""
    generates = False


class MistralModel(Mistral):
    """Mistral without a head."""

    prefix = ""
    generates = False


class Qwen2Model(Qwen2):
    """Qwen2 without a head."""

    prefix = ""
    generates = False
