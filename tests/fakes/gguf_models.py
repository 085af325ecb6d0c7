"""Tiny random models as GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDE, LAYERS, VOCAB = 4, 2, 16, 64, 96, 2, 32


def original_weights(family: str, tied: bool = True) -> dict[str, np.ndarray[Any, Any]]:
    """Random weights of a tiny model, named as in its safetensors."""
    random = np.random.default_rng(7)

    def make(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": make(VOCAB, HIDDEN), "model.norm.weight": make(HIDDEN)}
    if not tied:
        weights["lm_head.weight"] = make(VOCAB, HIDDEN)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{at}self_attn.{name}_proj.weight"] = make(rows * HEAD_DIM, HIDDEN)
            if family == "qwen2":
                weights[f"{at}self_attn.{name}_proj.bias"] = make(rows * HEAD_DIM)
        if family in ("qwen3", "gemma3"):
            weights[f"{at}self_attn.q_norm.weight"] = make(HEAD_DIM)
            weights[f"{at}self_attn.k_norm.weight"] = make(HEAD_DIM)
        weights[f"{at}self_attn.o_proj.weight"] = make(HIDDEN, HEADS * HEAD_DIM)
        weights[f"{at}mlp.gate_proj.weight"] = make(WIDE, HIDDEN)
        weights[f"{at}mlp.up_proj.weight"] = make(WIDE, HIDDEN)
        weights[f"{at}mlp.down_proj.weight"] = make(HIDDEN, WIDE)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if family == "gemma3":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for norm in norms:
            weights[f"{at}{norm}.weight"] = make(HIDDEN)
    return weights


def permuted(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to Llama's query and key rows."""
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    family: str,
    weights: dict[str, np.ndarray[Any, Any]],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    keys: dict[str, Any] | None = None,
) -> None:
    """Write a model to GGUF as llama.cpp's converter would, by the gguf package's own name map.

    kind: of matrices; kinds: of those with such a word in their name."""
    arch = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gemma3": "GEMMA3"}[family]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], LAYERS)
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(VOCAB)
    if family == "llama":
        writer.add_rope_dimension_count(HEAD_DIM)
    else:
        writer.add_key_length(HEAD_DIM)
    adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, stated in (keys or {}).items():
        adders[type(stated)](key, stated)
    for name, value in weights.items():
        stem, suffix = name.rsplit(".", 1)
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            value = permuted(value, HEADS if "q_proj" in name else KV_HEADS)
        if family == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        target = f"{names.get_name(stem)}.{suffix}"
        mine = next((k for word, k in (kinds or {}).items() if word in name), kind)
        if mine != gguf.GGMLQuantizationType.F32 and value.ndim == 2:
            writer.add_tensor(target, gguf.quantize(value, mine), raw_dtype=mine)
        else:
            writer.add_tensor(target, value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
