"""What a checkpoint in the layout of sentence-transformers says of pooling: modules.json and what it names.

Format: modules.json lists modules in the order in which they run, each with a type and a folder. Read
are Transformer (whose folder has the model, and sentence_bert_config.json), Pooling and Normalize.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.loading.errors import ModelConfigError
from octavo.core.loading.files import ModelFiles, read_json
from octavo.core.pooling import PoolingKind

_MODES: dict[str, PoolingKind] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "last_token": "last",
}
_ANY: tuple[int, ...] = ()


@dataclass(frozen=True)
class SentenceModules:
    """What the files say; None: nothing.

    max_tokens: of a prompt. dimensions: of embeddings that are cut; empty: any; None: none.
    default_prompt: a text that the library puts in front of every prompt.
    """

    pooling: PoolingKind | None = None
    normalize: bool | None = None
    max_tokens: int | None = None
    lowercase: bool = False
    dimensions: tuple[int, ...] | None = None
    default_prompt: str | None = None


def sentence_modules(
    files: ModelFiles, config: Mapping[str, Any], asked: PoolingKind | None = None
) -> SentenceModules:
    """Reads them. config: the model's config.json, which may name dimensions, too. asked: the pooling that
    is wanted instead of the checkpoint's.

    Raises:
        ModelConfigError: a module or a way of pooling that is not implemented.
    """
    if files.kind == "gguf":
        return SentenceModules()
    folder = files.path
    extra = _optional(folder / "config_sentence_transformers.json")
    dimensions = _dimensions(config)
    dimensions = _dimensions(extra) if dimensions is None else dimensions
    name = extra.get("default_prompt_name")
    default = (extra.get("prompts") or {}).get(name) if name is not None else None
    listed = folder / "modules.json"
    if not listed.is_file():
        return SentenceModules(dimensions=dimensions, default_prompt=default)
    modules = read_json(listed)
    pooling: PoolingKind | None = None
    normalize = False
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        paths = [folder / str(module.get("path", "")) for module in modules]
    except (TypeError, KeyError, AttributeError) as error:
        raise ModelConfigError(
            f"{listed} is no list of modules with types and paths ({error!r})"
        ) from error
    own = folder
    for kind, path in zip(kinds, paths, strict=True):
        if kind == "Transformer":
            own = path
        elif kind == "Pooling":
            pooling = asked or _pooling(path / "config.json")
        elif kind == "Normalize":
            normalize = True
        else:
            raise ModelConfigError(
                f"{listed} has a module {kind}, which is not implemented; of sentence-transformers' "
                "modules Transformer, Pooling and Normalize are. --task generate ignores them"
            )
    settings = _optional(own / "sentence_bert_config.json")
    most = settings.get("max_seq_length")
    return SentenceModules(
        pooling,
        normalize,
        int(most) if most else None,
        bool(settings.get("do_lower_case")),
        dimensions,
        default,
    )


def _pooling(path: Path) -> PoolingKind:
    """The one way of pooling that a Pooling module's config names."""
    settings = _optional(path)
    stated = settings.get("pooling_mode")
    if stated is not None:
        modes = [stated] if isinstance(stated, str) else list(stated)
    else:
        prefix = "pooling_mode_"
        modes = [
            n.removeprefix(prefix) for n, on in settings.items() if n.startswith(prefix) and on
        ]
    if len(modes) != 1 or modes[0] not in _MODES:
        found = ", ".join(map(str, modes)) or "none"
        raise ModelConfigError(
            f"{path} pools by {found}; implemented are cls_token, mean_tokens and lasttoken, one of "
            "them. --pooling mean, last or cls overrides it"
        )
    return _MODES[modes[0]]


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Shorter embeddings that a config allows (Matryoshka, Kusupati et al. 2022), under vLLM's names."""
    listed = config.get("matryoshka_dimensions")
    if listed:
        return tuple(sorted(int(size) for size in listed))
    return _ANY if config.get("is_matryoshka") else None


def _optional(path: Path) -> dict[str, Any]:
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} holds no JSON object")
    return value
