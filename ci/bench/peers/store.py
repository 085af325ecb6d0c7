"""Results as files, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.core.entry.bench.machine import cpu_model, usable_cores

Status = Literal["ok", "failed", "refused"]


@dataclass(frozen=True)
class Result:
    """One run of one work by one engine.

    values: metric -> tokens per second, or seconds ("start"); of a run that succeeded.
    batched: {"width", "prefill", "decode"} of the engine's own tool, tokens per second.
    tokens: of each request. idle: what disturbed the machine; None: nothing did.
    """

    engine: str
    version: str
    work: str
    run: int
    digest: str
    status: Status
    reason: str = ""
    values: dict[str, float] = field(default_factory=dict)
    batched: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    peak_rss_bytes: int | None = None
    tokens: list[list[int]] = field(default_factory=list)
    disturbed: str | None = None
    waited_seconds: float = 0.0
    wall_seconds: float = 0.0
    date: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def machine_key() -> str:
    """The same on the same kind of machine only: results of another one are never mixed in."""
    text = f"{cpu_model()} {_cpu_details()} {platform.system()} {platform.release()}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return _safe(f"{cpu_model()}-{usable_cores()}cores-{digest}")


def _cpu_details() -> str:
    wanted = ("cpu family", "model\t", "stepping", "flags")
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.machine()
    return " ".join(line for line in lines if line.startswith(wanted))


def _safe(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-")


class Store:
    """`folder`/machine/engine/version/work-digest-run.json"""

    def __init__(self, folder: Path, machine: str | None = None) -> None:
        self.folder = folder / (machine or machine_key())

    def path(self, engine: str, version: str, work: str, digest: str, run: int) -> Path:
        name = f"{work}-{digest}-run{run}.json"
        return self.folder / _safe(engine) / _safe(version) / name

    def load(self, engine: str, version: str, work: str, digest: str, run: int) -> Result | None:
        """What is known of this very run; None when it is to be done. A file that cannot be read
        counts as none."""
        path = self.path(engine, version, work, digest, run)
        try:
            return Result(**json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def save(self, result: Result) -> Path:
        """Whole or not at all, so that an interrupted run leaves no half file."""
        path = self.path(result.engine, result.version, result.work, result.digest, result.run)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(dataclasses.asdict(result)), "utf-8")
        os.replace(part, path)
        return path
