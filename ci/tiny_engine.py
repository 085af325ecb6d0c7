#!/usr/bin/env python3
"""The whole engine with tiny random models, on the machine it runs on: prints the tokens as JSON.

Every model runs on every device word given, in every number format, with requests that are chunked,
preempted, share a prefix, and are sampled several times: scheduler, cache, kernels and sampler together.
`qemu_engine.py` runs it as CPUs that this machine is not, and compares.

    python ci/tiny_engine.py --make FOLDER           writes the models
    python ci/tiny_engine.py FOLDER DEVICE [DEVICE]  runs them
"""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 101
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "grouped heads": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "window, odd head size": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 24,
        "sliding_window": 17,
    },
    "biases, tied head": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
}
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16 cache": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    "int8 weights": {"dtype": "float32", "quantization": "int8"},
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors by name."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (VOCAB, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            out[f"{layer}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                out[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        out[f"{layer}.self_attn.o_proj.weight"] = (hidden, q)
        out[f"{layer}.mlp.gate_proj.weight"] = (wide, hidden)
        out[f"{layer}.mlp.up_proj.weight"] = (wide, hidden)
        out[f"{layer}.mlp.down_proj.weight"] = (hidden, wide)
        out[f"{layer}.input_layernorm.weight"] = (hidden,)
        out[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    return out


def make(folder: Path) -> None:
    """Writes the models, as folders in the format of Hugging Face."""
    for number, (name, changes) in enumerate(MODELS.items()):
        config = BASE | changes
        dice = np.random.default_rng(number)
        header: dict[str, Any] = {}
        data = b""
        for tensor, shape in shapes(config).items():
            noise = dice.standard_normal(shape, dtype=np.float32)
            values = 1 + 0.2 * noise if "norm" in tensor else 0.25 * noise
            raw = values.astype("<f4").tobytes()
            span = [len(data), len(data) + len(raw)]
            header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": span}
            data += raw
        described = json.dumps(header).encode()
        described += b" " * (-len(described) % 8)
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
        packed = struct.pack("<Q", len(described)) + described + data
        (target / "model.safetensors").write_bytes(packed)


def tokens_of(folder: Path, device: str, options: dict[str, Any]) -> list[list[int]]:
    """What six requests generate, by request and sample, in a cache too small for all of them."""
    from octavo.core.config import EngineConfig
    from octavo.core.entry.wiring import build_engine
    from octavo.core.params import SamplingParams
    from octavo.core.types import Request

    engine = build_engine(
        EngineConfig.from_kwargs(
            model=folder,
            device=device,
            num_kv_blocks=9,
            block_size=16,
            max_num_batched_tokens=24,
            max_num_seqs=4,
            packed_cache=False,
            **options,
        )
    )
    dice = np.random.default_rng(7)
    common = dice.integers(VOCAB, size=40).tolist()
    for i in range(6):
        prompt = common[: (0, 20, 35)[i % 3]] + dice.integers(VOCAB, size=3 + i).tolist()
        drawn: dict[str, Any] = {"temperature": 0.0}
        if i == 5:
            drawn = {"temperature": 0.8, "seed": i, "top_k": 20}
        params = SamplingParams(max_tokens=24, n=2 if i == 1 else 1, **drawn)
        engine.add(Request(id=str(i), prompt_token_ids=prompt, params=params))
    out: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished():
        for update in engine.step():
            out.setdefault((update.request_id, update.index), []).extend(update.token_ids)
    stats = engine.stats()
    engine.shutdown()
    if not (stats.preemptions and stats.prefix_hit_tokens):
        raise SystemExit(f"{folder.name}: nothing was preempted, or no prefix was shared: {stats}")
    return [tokens for _, tokens in sorted(out.items())]


def main() -> None:
    if sys.argv[1] == "--make":
        make(Path(sys.argv[2]))
        return
    import torch

    from octavo.kernels.cpu.library import lib

    torch.set_num_threads(1)
    folder, devices = Path(sys.argv[1]), sys.argv[2:]
    began = time.monotonic()
    tokens = {
        f"{device} / {form} / {name}": tokens_of(folder / name, device, options)
        for device in devices
        for form, options in FORMATS.items()
        for name in MODELS
    }
    isa = lib.isa().decode() if "cpu" in devices else ""
    seconds = round(time.monotonic() - began, 1)
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    print(json.dumps({"tokens": tokens, "isa": isa, "seconds": seconds, **versions}))


if __name__ == "__main__":
    main()
