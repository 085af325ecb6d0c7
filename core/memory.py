"""Memory and cores this process may really use: the host's, cut by cgroup limits."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from octavo.core.contract import MemoryInfo


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {k: int(v.split()[0]) * 1024 for k, v in (line.split(":", 1) for line in lines)}


def host_memory() -> MemoryInfo:
    """Bytes of memory in all and available now, no more than the cgroup (v1 or v2) allows."""
    info = _meminfo()
    if info:
        total, free = info["MemTotal"], info.get("MemAvailable", info["MemFree"])
    else:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        free = total // 2
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, used = _number(limit_file), _number(used_file)
        if limit is not None and limit < total:
            total = limit
            free = min(free, max(0, limit - (used or 0)))
    return MemoryInfo(total=total, free=free)


def trim_heap() -> None:
    """Gives memory that the C library's heap holds free back to the system, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
