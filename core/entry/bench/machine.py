"""What a measurement was made on, and whether the machine was left alone meanwhile."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("octavo", "torch", "transformers", "tokenizers", "numpy")
BUSY_SHARE = 0.05
"""Share of the machine that others may take before a measurement is called disturbed."""


def cpu_model() -> str:
    """The CPU's name, as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_rss_bytes() -> int | None:
    """The most memory this process has held at once, where the system tells it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Versions of what takes part in a measurement."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe() -> dict[str, Any]:
    """The machine and its software; torch's threads when this process uses torch."""
    found: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": versions(),
    }
    if (torch := sys.modules.get("torch")) is not None:
        found["torch_threads"] = torch.get_num_threads()
    return found


@dataclass(frozen=True, slots=True)
class Load:
    """Use of the whole machine over a span, as shares of all its cores' time (0 to 1)."""

    ours: float
    others: float
    steal: float  # taken by the host for other virtual machines

    @property
    def disturbed(self) -> bool:
        return self.others + self.steal > BUSY_SHARE

    def __str__(self) -> str:
        return (
            f"other processes took {self.others:.0%} of the machine, the host {self.steal:.0%}; "
            f"this process used {self.ours:.0%}"
        )


class LoadMeter:
    """Tells, between its making and `read()`, who used the CPUs. None where /proc is not there."""

    def __init__(self) -> None:
        self._wall, self._ours, self._system = self._now()

    @staticmethod
    def _now() -> tuple[float, float, tuple[float, float] | None]:
        times = os.times()
        return time.perf_counter(), times.user + times.system, _cpu_seconds()

    def read(self) -> Load | None:
        wall, ours, system = self._now()
        if system is None or self._system is None or wall <= self._wall:
            return None
        whole = (wall - self._wall) * (os.cpu_count() or 1)
        mine = (ours - self._ours) / whole
        busy, steal = ((b - a) / whole for a, b in zip(self._system, system, strict=True))
        return Load(ours=mine, others=max(0.0, busy - mine), steal=max(0.0, steal))


def _cpu_seconds() -> tuple[float, float] | None:
    """(busy, stolen) seconds of all CPUs since boot, from the first line of /proc/stat (proc(5))."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (float(f) for f in fields[:8])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks, steal / ticks


def idle_warning(seconds: float = 0.5) -> str | None:
    """Looks at the machine for a moment; what disturbs a measurement, if anything does."""
    meter = LoadMeter()
    time.sleep(seconds)
    load = meter.read()
    if load is not None and load.disturbed:
        return f"the machine is not idle: {load}. Absolute figures will be too low"
    if load is None and hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
        return f"the machine is not idle: its load average is {os.getloadavg()[0]:.1f}"
    return None
