"""One engine, one work, one run: in a fresh process, on an idle machine."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.core.entry.bench.machine import BUSY_SHARE, LoadMeter
from peers.engines import Prepared
from peers.job import Job
from peers.processes import group, tail
from peers.store import Result, Status

_LOOK_SECONDS, _SHORT_LOOK_SECONDS = 2.0, 0.1


def wait_idle(limit: float, look: Callable[[], float] | None = None) -> tuple[float, str | None]:
    """Waits until others leave the machine alone, for at most `limit` seconds.

    Args:
        look: tells the share of the machine (0 to 1) that others take now.

    Returns:
        seconds waited, and what still disturbs the machine, if anything does.
    """
    look = look or (lambda: _others_now(_LOOK_SECONDS if limit else _SHORT_LOOK_SECONDS))
    started = time.monotonic()
    while True:
        waited = time.monotonic() - started
        share = look()
        if share <= BUSY_SHARE:
            return waited, None
        if waited >= limit:
            return waited, f"others took {share:.0%} of the machine before the run"
        if waited == 0.0 or int(waited) % 30 == 0:
            print(f"    waiting for an idle machine: others take {share:.0%}", flush=True)


def _others_now(seconds: float) -> float:
    meter = LoadMeter()
    time.sleep(seconds)
    load = meter.read()
    if load is None:
        return max(0.0, os.getloadavg()[0] - BUSY_SHARE) / (os.cpu_count() or 1)
    return load.others + load.steal


class _Watch:
    """The share of the machine that neither this process nor its children took."""

    def __init__(self) -> None:
        self._meter, self._started = LoadMeter(), time.perf_counter()
        self._children = self._children_now()

    @staticmethod
    def _children_now() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def disturbed(self) -> str | None:
        load = self._meter.read()
        if load is None:
            return None
        whole = (time.perf_counter() - self._started) * (os.cpu_count() or 1)
        others = load.others + load.steal - (self._children_now() - self._children) / whole
        if others <= BUSY_SHARE:
            return None
        return f"others took {others:.0%} of the machine during the run"


def measure(
    engine: str,
    prepared: Prepared,
    job: Job,
    run: int,
    *,
    work_folder: Path,
    timeout: float,
    wait: float,
) -> Result:
    """Runs a job in a process group of its own and says what came of it; never raises for the engine.

    Run 0 is the first start: caches of compiled code and of converted weights are empty.

    Args:
        timeout: seconds after which the run is given up.
        wait: seconds to wait at most for an idle machine.
    """
    blank = Result(engine, prepared.version, job.work, run, job.digest(), "failed")
    log = work_folder / "log" / f"{engine}-{job.work}-run{run}.log"
    waited, busy = wait_idle(wait)
    watch, started = _Watch(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cpu-peers-") as scratch:
        files = Path(scratch) / "job.json", Path(scratch) / "out.json"
        job = dataclasses.replace(job, spawned=time.monotonic())
        files[0].write_text(job.to_json(), "utf-8")
        environment = prepared.environment | _caches(work_folder, engine, job, run)
        command = [*prepared.command, str(files[0])]
        with group(command, files[1], log, environment) as process:
            try:
                process.wait(timeout)
                found = _last_line(files[1], process.returncode, log)
            except subprocess.TimeoutExpired:
                found = {"error": f"no result within {timeout:g} s"}
    disturbed = busy or watch.disturbed()
    done = dataclasses.replace(
        blank,
        disturbed=disturbed,
        waited_seconds=round(waited, 1),
        wall_seconds=round(time.monotonic() - started, 2),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if "error" in found:
        status: Status = "refused" if found.get("refused") else "failed"
        return dataclasses.replace(done, status=status, reason=found["error"])
    return dataclasses.replace(
        done,
        status="ok",
        values=_values(job, found),
        batched=found.get("batched", []),
        seconds=found["seconds"],
        peak_rss_bytes=found.get("peak_rss_bytes"),
        tokens=found.get("tokens", []),
        notes=found.get("notes", {}),
    )


def _caches(work_folder: Path, engine: str, job: Job, run: int) -> dict[str, str]:
    """Folders for what an engine keeps between starts. Those of start-up begin empty at run 0."""
    name = f"{engine}-startup" if job.kind == "startup" else engine
    folder = work_folder / "cache" / name
    if job.kind == "startup" and run == 0:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "XDG_CACHE_HOME": str(folder),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "OCTAVO_CACHE_DIR": str(folder / "octavo"),
    }


def _last_line(out: Path, code: int | None, log: Path) -> dict[str, Any]:
    lines = out.read_text("utf-8", errors="replace").strip().splitlines()
    try:
        found = json.loads(lines[-1])
        if isinstance(found, dict) and ("error" in found or "seconds" in found):
            return found
    except (IndexError, ValueError):
        pass
    return {"error": f"the process ended with {code} and no result: {tail(log)}"}


def _values(job: Job, found: dict[str, Any]) -> dict[str, float]:
    if job.kind == "batched":
        return {}
    if job.kind == "startup":
        return {"start": found["start_seconds"]}
    prompt = sum(len(item.prompt) for item in job.items)
    output = sum(item.output for item in job.items)
    seconds = found["seconds"]
    return {
        "output": output / seconds,
        "prompt": prompt / seconds,
        "total": (prompt + output) / seconds,
    }
