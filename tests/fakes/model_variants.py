"""The tiny models that engines are tried with: one of each kind, and as many random ones as wanted."""

from __future__ import annotations

import random
from typing import Any

from tiny_models import make


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

# name -> (config class, changes to BASE, length of the prompt)
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("Llama", {}, 20),
    "tied head": ("Llama", {"tie_word_embeddings": True}, 20),
    "biases everywhere": ("Llama", {"attention_bias": True, "mlp_bias": True}, 20),
    "no grouping": ("Llama", {"num_key_value_heads": 4}, 20),
    "one kv head": ("Llama", {"num_key_value_heads": 1}, 20),
    "head size of its own": ("Llama", {"head_dim": 24}, 20),
    "small head size": ("Llama", {"head_dim": 10, "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3}, 20),
    "gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}, 20),
    "exact gelu": ("Llama", {"hidden_act": "gelu"}, 20),
    "large base": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, 20),
    "linear rope": ("Llama", rope("linear", factor=4.0) | {"head_dim": 32}, 60),
    "llama3 rope": ("Llama", LLAMA3 | {"head_dim": 32}, 60),
    "yarn rope": ("Llama", YARN | {"head_dim": 64}, 60),
    "yarn with its own factors": (
        "Llama",
        rope("yarn", factor=2.0, original_max_position_embeddings=64, beta_fast=20.0, beta_slow=2.0,
             attention_factor=1.3),
        60,
    ),
    "mistral": ("Mistral", {"sliding_window": None}, 40),
    "mistral window": ("Mistral", {"sliding_window": 8}, 40),
    "mistral window of one block": ("Mistral", {"sliding_window": 16, "head_dim": 16}, 70),
    "qwen2": ("Qwen2", {}, 30),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}, 30),
    "qwen2 mixed windows": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED}, 40,
    ),
    "qwen2 all full though a window is named": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 3},
        40,
    ),
    "qwen2 window from a layer on": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 40,
    ),
    "qwen2 window switched off": ("Qwen2", {"use_sliding_window": False, "sliding_window": 8}, 40),
}  # fmt: skip

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
]  # fmt: skip


def random_model(dice: random.Random, kind: str) -> Any:
    heads, kv_heads = dice.choice([(4, 2), (4, 4), (6, 2), (8, 1)])
    size = dice.choice([8, 16, 32])
    changes: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * size,
        "max_position_embeddings": 512,
        "tie_word_embeddings": dice.random() < 0.5,
        "intermediate_size": dice.choice([17, 52, 64]),
        "num_hidden_layers": dice.choice([2, 3]),
    }
    if kind == "Llama":
        changes["head_dim"] = dice.choice([8, 24, 64])
        changes["rope_parameters"] = dice.choice(ROPES) | {"rope_theta": 10000.0}
    elif kind == "Mistral":
        changes["sliding_window"] = dice.choice([1, 5, 16, 17, 33])
    else:
        changes |= {"use_sliding_window": True, "sliding_window": dice.choice([3, 16, 40]),
                    "max_window_layers": dice.choice([0, 1])}  # fmt: skip
    return make(kind, changes)
