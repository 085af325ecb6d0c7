"""`octavo devices [NAME]`: what `--device` takes here, and what each device can do."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.plugins.manager import Plugins, Resolved
    from octavo.plugins.overrides import ResolvedOps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("NAME", nargs="?", help="a device word: show its capabilities")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    parser.add_argument(
        "--ops-from",
        default="auto",
        metavar="NAMES",
        help="with NAME: which plug-ins may replace its ops, as for an engine",
    )


def run(options: argparse.Namespace) -> None:
    """Prints a table of device words, or one device's capabilities."""
    from octavo.plugins.manager import plugins

    found = plugins()
    for problem in found.problems:
        print(f"plug-in {problem.plugin} cannot be used: {problem.reason}", file=sys.stderr)
    if options.NAME is not None:
        _one(found, options.NAME, options.ops_from, options.json)
        return
    for clash in found.op_clashes():
        print(clash, file=sys.stderr)
    from octavo.plugins.manager import describe

    rows = found.devices()
    if options.json:
        print(json.dumps([describe(row) for row in rows], default=list))
        return
    for row in rows:
        state = ", ".join(row.devices) or f"none: {row.reason}"
        if row.install and row.install not in state:
            state += f" ({row.install})"
        facts = "".join(f"; {name} {value}" for name, value in row.details.items())
        print(f"{row.word:<12} {row.backend:<10} {state}{facts}")


def _replaced(found: Plugins, resolved: Resolved, choice: str) -> ResolvedOps:
    """The ops of a device that no engine uses yet; they are made only where a plug-in wants some."""
    from octavo.core.contract import Ops
    from octavo.plugins.overrides import ResolvedOps, ordered

    claimed = [c.override.backend for c in ordered(found.claims, choice)]
    if resolved.backend.name not in claimed:
        return ResolvedOps(Ops())
    return found.resolved_ops(resolved.backend, resolved.device, choice)


def _one(found: Plugins, word: str, choice: str, as_json: bool) -> None:
    from octavo.core.entry.op_choice import capabilities_of

    resolved = found.resolve(word)
    replaced = _replaced(found, resolved, choice)
    for problem in replaced.problems:
        print(problem, file=sys.stderr)
    told = capabilities_of(resolved.backend, resolved.device, replaced)
    memory = resolved.backend.memory(resolved.device)
    facts: dict[str, Any] = {
        "device": resolved.device,
        "backend": resolved.backend.name,
        "reason": resolved.reason,
        "memory_total": memory.total,
        "memory_free": memory.free,
        **told,
        "overrides": [*replaced.notes, *replaced.clashes],
    }
    if as_json:
        print(json.dumps(facts, default=list))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, item in value.items():
                print(f"  {key:<18} {item}")
        elif isinstance(value, list):
            for item in value:
                print(f"{name:<20} {item}")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            print(f"{name:<20} {shown}")
