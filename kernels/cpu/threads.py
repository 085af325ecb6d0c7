"""The kernels' own threads, and how many cores this process may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from octavo.kernels.cpu.library import lib

_threading = "serial until an engine starts"


def threading() -> str:
    """How kernels are spread over cores, in words: "2 threads", "serial"."""
    return _threading


def threads() -> int:
    """The number of threads a kernel may use."""
    return int(lib.threads())


def set_threads(count: int | None = None, *, spins: int | None = None) -> str:
    """Gives the kernels a pool of `count` threads, the caller included; the old pool ends.

    The default is torch's own number if torch is imported, else :func:`core_count`. A waiting thread
    looks `spins` times (default 2000, some tens of microseconds) and then sleeps. Returns
    :func:`threading`.
    """
    global _threading
    if count is None:
        torch = sys.modules.get("torch")
        count = int(torch.get_num_threads()) if torch else core_count()
    if count < 1:
        raise ValueError(f"threads must be at least 1, not {count}")
    made = int(lib.set_threads(count, -1 if spins is None else spins))
    _threading = "serial" if made == 1 else f"{made} threads"
    if made < count:
        _threading += f" (the system gave no more of {count})"
    return _threading


def core_count(root: str = "/") -> int:
    """Cores this process may use: its affinity, cut down to the cgroup CPU quota; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [q for q in _cgroup_quotas(Path(root)) if q > 0]
    return max(1, int(min([float(count or 1), *quotas])))


def _cgroup_quotas(root: Path) -> list[float]:
    """CPU quotas, in cores, of this process's control groups and their parents (v1 and v2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    quotas: list[float] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            bases = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            bases = [root / "sys/fs/cgroup" / name for name in (controllers, "cpu")]
        else:
            continue
        for base in bases:
            # Inside a container the group's own path may not be mounted: its root is then ours.
            folder = base / group.lstrip("/")
            for parent in [folder, *folder.parents]:
                if parent == base or base in parent.parents:
                    quotas += _quota(parent)
    return quotas


def _quota(folder: Path) -> list[float]:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return [] if limit == "max" else [int(limit) / int(period)]
    except (OSError, ValueError):
        pass
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return [quota / int((folder / "cpu.cfs_period_us").read_text())] if quota > 0 else []
    except (OSError, ValueError):
        return []
