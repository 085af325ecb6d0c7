"""`octavo models`: what fetched and converted models take on this disk."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from octavo.core.config import default_cache_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--remove", metavar="NAME", help="delete an entry: name or name==version")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="where models are kept")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(options: argparse.Namespace) -> None:
    """Lists the cache's entries, or removes one."""
    from octavo.core.loading.sources import cached_models, remove

    cache = options.cache_dir or default_cache_dir()
    entries = remove(options.remove, cache) if options.remove else cached_models(cache)
    rows = [
        {
            "name": entry.name,
            "version": entry.version,
            "bytes": entry.num_bytes,
            "path": str(entry.path),
        }
        for entry in entries
    ]
    if options.json:
        print(json.dumps(rows))
        return
    for row, entry in zip(rows, entries, strict=True):
        size = f"{entry.num_bytes / 1e6:.0f} MB"
        done = "removed " if options.remove else ""
        print(f"{done}{entry.name:<28} {entry.version or '-':<12} {size:>8}  {row['path']}")
