"""GGUF metadata -> a config.json-like dict.

The dict is the one transformers makes from the same file, with what the file leaves out filled in
(Gemma 3's local rotary base and window pattern) and what transformers does not read from it added
(Qwen 3's head size, rotary scaling).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from octavo.core.loading.errors import ModelConfigError
from octavo.core.loading.gguf import GgufFile

_ARCHITECTURES = {
    # GGUF architecture: (model_type, architectures)
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_GEMMA3_WINDOW_PATTERN = 6  # five sliding layers, then a full one; no key of the file says so
_GEMMA3_LOCAL_ROPE_BASE = 10_000.0
_GEMMA3_27B_LAYERS = 62
_LLAMA3_ORIGINAL_CONTEXT = 8192


def gguf_config(path: Path) -> dict[str, Any]:
    """The configuration a GGUF file states. Raises ModelConfigError for what cannot be run."""
    file = GgufFile(path)
    try:
        return config_of(file)
    finally:
        file.close()


def config_of(file: GgufFile) -> dict[str, Any]:
    """``gguf_config`` of a file that is open already."""
    arch = file.architecture
    if arch not in _ARCHITECTURES:
        raise ModelConfigError(
            f"{file.path} holds a model of GGUF architecture {arch!r}; these are read: "
            f"{', '.join(sorted(_ARCHITECTURES))}. Use the model's safetensors folder instead."
        )
    if file.get(f"{arch}.expert_count", 0):
        raise ModelConfigError(
            f"{file.path} holds a mixture of experts, which is not read from GGUF. Use the model's "
            "safetensors folder instead."
        )

    if file.get("split.count", 1) > 1:
        raise ModelConfigError(
            f"{file.path} is one of {file.get('split.count')} files of a split model. Merge them "
            "(llama.cpp's gguf-split --merge) and give the merged file."
        )

    def stated(key: str) -> Any:
        value = file.get(f"{arch}.{key}")
        if value is None:
            raise ModelConfigError(f"{file.path} does not state {arch}.{key}; convert it again")
        return value

    model_type, class_name = _ARCHITECTURES[arch]
    heads = stated("attention.head_count")
    head_key = "rope.dimension_count" if arch == "llama" else "attention.key_length"
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [class_name],
        "hidden_size": stated("embedding_length"),
        "intermediate_size": stated("feed_forward_length"),
        "num_hidden_layers": stated("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": file.get(f"{arch}.{head_key}", stated("embedding_length") // heads),
        "max_position_embeddings": stated("context_length"),
        "rms_norm_eps": stated("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.get(f"{arch}.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, arch),
        "vocab_size": _vocab_size(file, arch),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
        "unk_token_id": file.get("tokenizer.ggml.unknown_token_id"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if arch == "gemma3":
        config |= _gemma3(file, config)
    else:
        config["hidden_act"] = "silu"
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return config


def _vocab_size(file: GgufFile, arch: str) -> int:
    tokens = file.get(f"{arch}.vocab_size") or file.length("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelConfigError(f"{file.path} states neither {arch}.vocab_size nor a vocabulary")
    return int(tokens)


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    kinds = [
        "full_attention" if (i + 1) % _GEMMA3_WINDOW_PATTERN == 0 else "sliding_attention"
        for i in range(layers)
    ]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "sliding_window": file.get("gemma3.attention.sliding_window", 4096),
        "sliding_window_pattern": _GEMMA3_WINDOW_PATTERN,
        "layer_types": kinds,
        "rope_theta": file.get("gemma3.rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": _GEMMA3_LOCAL_ROPE_BASE,
        # The file does not say it: 256 for every size but 27B, which scales by its true head share.
        "query_pre_attn_scalar": per_head if layers == _GEMMA3_27B_LAYERS else 256,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _rope_scaling(file: GgufFile, arch: str) -> dict[str, Any] | None:
    """Rotary scaling: stated by keys, or by llama.cpp's table of factors for Llama 3."""
    kind = file.get(f"{arch}.rope.scaling.type", "none")
    factor = file.get(f"{arch}.rope.scaling.factor")
    if kind in {"linear", "yarn"} and factor:
        scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
        original = file.get(f"{arch}.rope.scaling.original_context_length")
        if original:
            scaling["original_max_position_embeddings"] = original
        return scaling
    if kind not in {"none", "linear", "yarn"}:
        raise ModelConfigError(
            f"{file.path} scales rotary positions by {kind!r}; from GGUF none, linear and yarn are "
            "read. Use the model's safetensors folder instead."
        )
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None or tensor.type != 0:
        return None
    factors = list(struct.unpack_from(f"<{tensor.shape[0]}f", file.data, tensor.offset))
    return _scaling_of_factors(factors, file.get(f"{arch}.rope.freq_base", 10_000.0))


def _scaling_of_factors(factors: list[float], base: float) -> dict[str, Any] | None:
    """The rotary scaling whose inverse frequencies are divided by ``factors`` [head_dim / 2].

    Llama 3's formula is told by its own result, so that the config says "llama3" as the original
    does; any other table is given as it is, under the scheme that takes one.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    llama3 = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT,
    }
    expected = llama3_factors(len(factors), base, max(factors))
    if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)):
        return llama3
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": 1.0,
    }


def llama3_factors(half_dim: int, base: float, factor: float) -> list[float]:
    """What Llama 3.1's scaling divides each inverse frequency by; low 1, high 4, context 8192."""
    low, high = 1.0, 4.0
    factors = []
    for i in range(half_dim):
        wavelength = 2 * math.pi * base ** (i / half_dim)
        if wavelength < _LLAMA3_ORIGINAL_CONTEXT / high:
            factors.append(1.0)
        elif wavelength > _LLAMA3_ORIGINAL_CONTEXT / low:
            factors.append(factor)
        else:
            smooth = (_LLAMA3_ORIGINAL_CONTEXT / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
