"""Writes a model as a standard safetensors folder, which transformers and other engines load.

Layout: config.json, generation_config.json, model.safetensors (shards of at most 5 GB and their index
where it is larger), tokenizer.json, tokenizer_config.json with the chat template, and
special_tokens_map.json. The folder appears by one rename, whole or not at all.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from octavo.core.loading.errors import SourceError
from octavo.core.loading.files import ModelFiles
from octavo.core.loading.hf_config import eos_token_ids, load_config, load_generation_config
from octavo.core.loading.progress import Progress, SilentProgress
from octavo.core.loading.tokenizer import Tokenizer, load_tokenizer
from octavo.core.loading.weights import TensorInfo, WeightSource, open_weights

SHARD_BYTES = 5 * 10**9
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def export(
    files: ModelFiles,
    target: Path,
    *,
    dtype: str = "auto",
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes the model into the new folder `target`; returns its files.

    dtype: of the floating-point weights; auto: as they are stored, float32 for GGUF, whose
    quantised values no smaller one holds exactly.

    Raises:
        SourceError: the folder exists and is not empty, has no room, or cannot be written.
        ModelError: the model cannot be read.
    """
    target = target.expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SourceError(f"{target} exists and is not an empty folder: name a new one")
    progress = progress or SilentProgress()
    wanted = DTYPES.get(dtype)
    source = open_weights(files)
    try:
        infos = source.names()
        _check_room(target, sum(_size(info, wanted) for info in infos.values()))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".octavo-export-", dir=target.parent) as work:
                folder = Path(work) / "model"
                folder.mkdir()
                stored = _write_weights(source, infos, folder, wanted, shard_bytes, progress)
                tokenizer = load_tokenizer(files)
                _write_configs(files, tokenizer, folder, stored)
                _write_tokenizer(tokenizer, folder, files)
                if target.exists():
                    target.rmdir()
                folder.rename(target)
        except OSError as error:
            raise SourceError(f"{target} cannot be written: {error}") from error
    finally:
        source.close()
    return sorted(target.iterdir())


def _size(info: TensorInfo, wanted: torch.dtype | None) -> int:
    return math.prod(info.shape) * _stored(info, wanted).itemsize


def _stored(info: TensorInfo, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and info.dtype in _FLOATING else info.dtype


def _check_room(target: Path, needed: int) -> None:
    existing = next(path for path in (target, *target.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise SourceError(
            f"the model takes {needed:,} bytes and {existing} has {free:,} free: make room, or give "
            "a smaller --dtype"
        )


def _write_weights(
    source: WeightSource,
    infos: dict[str, TensorInfo],
    folder: Path,
    wanted: torch.dtype | None,
    shard_bytes: int,
    progress: Progress,
) -> torch.dtype:
    """Writes the shards, one in memory at a time; returns the weights' floating-point dtype."""
    from safetensors.torch import save_file

    shards = list(_shards(infos, wanted, shard_bytes))
    total = sum(_size(info, wanted) for info in infos.values())
    where: dict[str, str] = {}
    task = progress.task("Writing weights", total)
    try:
        for number, names in enumerate(shards, 1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = {}
            for key in names:
                tensors[key] = source.get(key).to(_stored(infos[key], wanted)).contiguous()
                task.advance(tensors[key].nbytes)
            save_file(tensors, folder / name, metadata={"format": "pt"})
            where.update(dict.fromkeys(names, name))
    finally:
        task.close()
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        _write_json(folder / "model.safetensors.index.json", index)
    floating = [_stored(i, wanted) for i in infos.values() if i.dtype in _FLOATING]
    return max(set(floating), key=floating.count, default=torch.float32)


def _shards(
    infos: dict[str, TensorInfo], wanted: torch.dtype | None, limit: int
) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, info in infos.items():
        more = _size(info, wanted)
        if names and size + more > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    yield names


def _write_configs(
    files: ModelFiles, tokenizer: Tokenizer, folder: Path, stored: torch.dtype
) -> None:
    config = {k: v for k, v in load_config(files).items() if k not in ("dtype", "torch_dtype")}
    # The older of the two spellings: everything reads it.
    config["torch_dtype"] = str(stored).removeprefix("torch.")
    generation = load_generation_config(files)
    if not generation:
        ids = eos_token_ids(config, {}, tokenizer.eos_token_id)
        found = {
            "bos_token_id": config.get("bos_token_id"),
            "eos_token_id": list(ids) if len(ids) > 1 else next(iter(ids), None),
            "pad_token_id": config.get("pad_token_id"),
        }
        generation = {name: value for name, value in found.items() if value is not None}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, files: ModelFiles) -> None:
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(pretty=True), "utf-8")
    template: Any = tokenizer.chat_template
    if template is not None and not isinstance(template, str):
        template = [{"name": name, "template": text} for name, text in template.items()]
    settings = {
        # The class that takes tokenizer.json as it is: what it does must not depend on the model type.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": load_config(files).get("max_position_embeddings"),
        **tokenizer.named,
        "chat_template": template,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", tokenizer.named)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", "utf-8")
