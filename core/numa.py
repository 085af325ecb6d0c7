"""Which processors an engine runs on, and the memory nodes they belong to.

Linux places a page on the node of the thread that touches it first, and a thread inherits the
processors of the one that starts it. So an engine that binds the thread which builds it, before any
pool is there, has its threads, its weights and its KV cache on one node; nothing else is needed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from octavo.core.config import ConfigError

NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Binding:
    """Processors to run on. node: the one they all belong to, on a machine that has several."""

    cpus: frozenset[int]
    node: int | None = None
    note: str | None = None


def nodes(root: Path = NODES) -> dict[int, frozenset[int]]:
    """Memory nodes with processors, and these; empty where the system does not tell."""
    found = {}
    for folder in root.glob("node[0-9]*"):
        try:
            cpus = parse_cpus((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus:  # a node may have memory alone
            found[int(folder.name.removeprefix("node"))] = cpus
    return dict(sorted(found.items()))


def parse_cpus(text: str) -> frozenset[int]:
    """`0-3,8` as the kernel writes it. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def node_free(node: int, root: Path = NODES) -> int | None:
    """Bytes of a node's memory that are free or hold files; None where the system does not tell."""
    try:
        lines = (root / f"node{node}" / "meminfo").read_text().splitlines()
        rows = {line.split()[2].rstrip(":"): int(line.split()[3]) << 10 for line in lines}
        return rows["MemFree"] + rows["Active(file)"] + rows["Inactive(file)"]
    except (OSError, KeyError, IndexError, ValueError):
        return None


def binding(
    affinity: str | None, node: int | None, allowed: frozenset[int], root: Path = NODES
) -> Binding | None:
    """What `--cpu-affinity` and `--numa-node` ask for; None: every processor that is allowed.

    Args:
        affinity: `0-3,8`, `node:1`, `none` or None.
        allowed: the processors that this process may use now.

    Raises:
        ConfigError: both are given, or what they name is not there.
    """
    if affinity is not None and node is not None:
        raise ConfigError("--cpu-affinity and --numa-node both say where to run: give one of them")
    asked = f"--numa-node {node}"
    if affinity is not None:
        word = affinity.strip().lower()
        if word == "none":
            return None
        asked = f"--cpu-affinity {affinity}"
        if not word.startswith("node:"):
            return _listed(asked, word, allowed, root)
        try:
            node = int(word.removeprefix("node:"))
        except ValueError:
            raise ConfigError(_forms(asked)) from None
    return None if node is None else _on_node(asked, node, allowed, root)


def bind(where: Binding) -> None:
    """Binds the calling thread, and with it every thread that it will start.

    Raises:
        ConfigError: the system does not allow it.
    """
    try:
        os.sched_setaffinity(0, where.cpus)
    except OSError as error:
        cpus = ", ".join(map(str, sorted(where.cpus)))
        raise ConfigError(f"this process cannot be bound to processors {cpus}: {error}") from None


def _listed(asked: str, word: str, allowed: frozenset[int], root: Path) -> Binding:
    try:
        cpus = parse_cpus(word)
    except ValueError:
        cpus = frozenset()
    if not cpus:
        raise ConfigError(_forms(asked))
    if beyond := cpus - allowed:
        raise ConfigError(
            f"{asked}: this process may not use {_ranges(beyond)}; it may use {_ranges(allowed)}"
        )
    known = nodes(root)
    homes = [node for node, those in known.items() if cpus <= those] if len(known) > 1 else []
    return Binding(cpus, homes[0] if homes else None)


def _on_node(asked: str, node: int, allowed: frozenset[int], root: Path) -> Binding:
    known = nodes(root)
    if not known:
        raise ConfigError(f"{asked}: this system does not tell its memory nodes; leave it out")
    if node not in known:
        there = ", ".join(f"{n} (processors {_ranges(cpus)})" for n, cpus in known.items())
        raise ConfigError(f"{asked}: there is no such node; this machine has {there}")
    cpus = known[node] & allowed
    if not cpus:
        raise ConfigError(
            f"{asked}: this process may use none of its processors {_ranges(known[node])}; "
            f"it may use {_ranges(allowed)}"
        )
    if len(known) == 1:
        return Binding(cpus, note=f"{asked}: this machine has one memory node, nothing changes")
    return Binding(cpus, node)


def _forms(asked: str) -> str:
    return f"{asked}: write processors as 0-3,8, or node:N, or none"


def _ranges(cpus: frozenset[int]) -> str:
    """{0, 1, 2, 8} -> `0-2,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
