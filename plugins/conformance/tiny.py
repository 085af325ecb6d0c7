"""Tiny random models, written as the checkpoints that engines load: config.json and safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.core.models.base import ARCHITECTURES, model_class
from octavo.plugins import Capabilities, Ops
from octavo.plugins.conformance.case import Dice, NotOffered

VOCAB = 101
POSITIONS = 1024

# What is special of each; the rest is drawn.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "grouped-heads": {"architecture": "LlamaForCausalLM", "heads": (4, 2)},
    "one-kv-head-tied": {"architecture": "LlamaForCausalLM", "heads": (8, 1), "tie_word_embeddings": True},
    "odd-head-size": {"architecture": "LlamaForCausalLM", "heads": (3, 3), "odd": True},
    "window": {"architecture": "MistralForCausalLM", "heads": (6, 2), "sliding_window": 17},
    "mixed-windows-biases": {
        "architecture": "Qwen2ForCausalLM", "heads": (4, 4), "use_sliding_window": True,
        "sliding_window": 16, "max_window_layers": 1,
    },
    "biases-gelu": {
        "architecture": "LlamaForCausalLM", "heads": (4, 1), "attention_bias": True, "mlp_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
}  # fmt: skip


def head_size(capabilities: Capabilities, odd: bool) -> int:
    """The smallest usual head size that is declared; an odd one is no power of two.

    Raises:
        NotOffered: there is none.
    """
    usual = (24, 40, 72, 80, 96, 112, 192) if odd else (16, 32, 64, 128, 256)
    low, high, step = capabilities.head_sizes
    first = -(-low // step) * step
    for size in (*usual, *(() if odd else (first,))):
        if not capabilities.refuses_head_size(size) and size <= high:
            return int(size)
    raise NotOffered(f"no head size between powers of two is declared ({capabilities.head_sizes})")


def write(folder: Path, name: str, size: int, dice: Dice, layers: int = 3, **settings: Any) -> Path:
    """A model's folder. Weights are large enough for greedy tokens to be certain in float32. `settings`
    take the place of what the configuration would have."""
    options = dict(MODELS[name])
    q_heads, kv_heads = options.pop("heads")
    options.pop("odd", None)
    architecture = options.pop("architecture")
    config = {
        "architectures": [architecture],
        "vocab_size": VOCAB,
        "hidden_size": int(dice.choice([32, 48])),
        "head_dim": size,
        "intermediate_size": int(dice.choice([52, 64, 80])),
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **options,
        **settings,
    }
    cls = model_class(config, ARCHITECTURES)
    model = cls(config, cls.shape(config, "float32"), Ops())
    tensors = {}
    for spec in model.specs():
        for part, shape in spec.parts:
            noise = dice.standard_normal(shape)
            if spec.role == "norm":
                values = 1 + 0.2 * noise
            elif spec.role == "bias":
                values = 0.3 * noise
            else:
                values = noise * 1.4 / math.sqrt(shape[-1] if spec.role != "embedding" else 2)
            tensors[part] = torch.from_numpy(values.astype(np.float32)).contiguous()
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt(dice: Dice, length: int) -> list[int]:
    return [int(t) for t in dice.integers(0, VOCAB, length)]
