"""Which ops an engine runs: its backend's, and those that plug-ins put in their place."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.contract import Backend
from octavo.plugins.manager import Resolved, plugins
from octavo.plugins.overrides import ResolvedOps


def choose_ops(config: EngineConfig, resolved: Resolved, notes: list[str]) -> ResolvedOps:
    """The device's ops, with those that plug-ins replace. What an operator should know joins `notes`;
    what goes wrong, and two plug-ins that want the same op, is a warning too.

    Raises:
        ConfigError: `--ops-from` names a plug-in that replaces no op, or some beside `--batch-invariant`,
            which the backend promises of its own ops alone.
    """
    choice = config.ops_from
    if config.batch_invariant and choice not in ("auto", "none"):
        raise ConfigError(
            f"--batch-invariant holds for a device's own ops: leave out --ops-from {choice}, or it"
        )
    if config.batch_invariant:
        choice = "none"
    found = plugins().resolved_ops(resolved.backend, resolved.device, choice)
    for text in (*found.problems, *found.clashes):
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    notes += [f"{op}: {claim}" for op, claim in sorted(found.sources.items())]
    notes += [*found.notes, *found.problems, *found.clashes]
    return found


def capabilities_of(backend: Backend, device: str, replaced: ResolvedOps) -> dict[str, Any]:
    """A device's capabilities as data, with the ops that really run."""
    facts = asdict(backend.capabilities(device))
    return {**facts, "ops": replaced.told(facts["ops"])}
