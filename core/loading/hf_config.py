"""A model's configuration as a plain config.json-like dict, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.loading.errors import ModelConfigError
from octavo.core.loading.files import ModelFiles, read_json


def load_config(files: ModelFiles) -> dict[str, Any]:
    """config.json, or the dict that a GGUF file's metadata amounts to."""
    if files.kind == "gguf":
        from octavo.core.loading.gguf_config import gguf_config

        return gguf_config(files.path)
    config = read_json(files.path / "config.json")
    if not isinstance(config, dict):
        raise ModelConfigError(f"{files.path / 'config.json'} holds no JSON object")
    return config


def load_generation_config(files: ModelFiles) -> dict[str, Any]:
    """generation_config.json, or {} where there is none (always so for GGUF)."""
    path = files.path / "generation_config.json"
    if files.kind == "gguf" or not path.is_file():
        return {}
    config = read_json(path)
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path} holds no JSON object")
    return config


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a checkpoint says of its own quantisation, or None when it holds plain numbers."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    return found if isinstance(found, Mapping) else {"quant_method": found}


def eos_token_ids(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    tokenizer_eos: int | None = None,
) -> tuple[int, ...]:
    """Every id that ends a sequence: the three sources' union, in that order, without repeats.

    Files state one id or a list. A generation config that names several (an end-of-turn beside an
    end-of-text) means each of them; the tokenizer's own is the one its chat template writes.
    """
    ids: dict[int, None] = {}
    for source in (
        generation_config.get("eos_token_id"),
        config.get("eos_token_id"),
        tokenizer_eos,
    ):
        for value in source if isinstance(source, list | tuple) else [source]:
            if value is not None:
                ids[int(value)] = None
    return tuple(ids)
