#!/usr/bin/env python3
"""A checkpoint with random weights in a folder, for machines that can fetch none.

    ci/bench/random_model.py FOLDER [--layers 16 --hidden 2048 --heads 32 --kv-heads 8 --head-size 64 ...]

What it answers means nothing; what it costs is what a trained model of these sizes costs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def config(options: argparse.Namespace) -> dict[str, object]:
    """config.json of a Llama of the sizes asked for."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_size,
        "max_position_embeddings": options.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": options.dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def weights(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, small enough for activations to stay finite."""
    dice = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=dice) * columns**-0.5).to(dtype)

    hidden, size = options.hidden, options.head_size
    out = {
        "model.embed_tokens.weight": matrix(options.vocab, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
    }
    for layer in range(options.layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}{name}.weight"] = torch.ones(hidden, dtype=dtype)
        for name, heads in (("q", options.heads), ("k", options.kv_heads), ("v", options.kv_heads)):
            out[f"{at}self_attn.{name}_proj.weight"] = matrix(heads * size, hidden)
        out[f"{at}self_attn.o_proj.weight"] = matrix(hidden, options.heads * size)
        for name in ("gate", "up"):
            out[f"{at}mlp.{name}_proj.weight"] = matrix(options.intermediate, hidden)
        out[f"{at}mlp.down_proj.weight"] = matrix(hidden, options.intermediate)
    return out


def tokenizer() -> Tokenizer:
    """A token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    sizes = {
        **{"layers": 16, "hidden": 2048, "intermediate": 8192, "heads": 32, "kv_heads": 8},
        **{"head_size": 64, "vocab": 32768, "positions": 32768},
    }
    for name, value in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "config.json").write_text(json.dumps(config(options), indent=1))
    tokenizer().save(str(options.folder / "tokenizer.json"))
    save_file(weights(options), options.folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
