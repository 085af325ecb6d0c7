"""`octavo devices [NAME]`: what `--device` takes here, and what each device can do."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("NAME", nargs="?", help="a device word: show its capabilities")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(options: argparse.Namespace) -> None:
    """Prints a table of device words, or one device's capabilities."""
    from octavo.plugins.manager import plugins

    found = plugins()
    for problem in found.problems:
        print(f"plug-in {problem.plugin} cannot be used: {problem.reason}", file=sys.stderr)
    if options.NAME is not None:
        _one(found, options.NAME, options.json)
        return
    from octavo.plugins.manager import describe

    rows = found.devices()
    if options.json:
        print(json.dumps([describe(row) for row in rows], default=list))
        return
    for row in rows:
        state = ", ".join(row.devices) or f"none: {row.reason}"
        facts = "".join(f"; {name} {value}" for name, value in row.details.items())
        print(f"{row.word:<12} {row.backend:<10} {state}{facts}")


def _one(found: Any, word: str, as_json: bool) -> None:
    resolved = found.resolve(word)
    facts = asdict(resolved.backend.capabilities(resolved.device))
    memory = resolved.backend.memory(resolved.device)
    facts = {
        "device": resolved.device,
        "backend": resolved.backend.name,
        "reason": resolved.reason,
        "memory_total": memory.total,
        "memory_free": memory.free,
        **facts,
    }
    if as_json:
        print(json.dumps(facts, default=list))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, item in value.items():
                print(f"  {key:<18} {item}")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            print(f"{name:<20} {shown}")
