"""The part that all adapters share: a job in, one line of JSON out. Standard library only."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from peers.job import Item, Job


class Refused(Exception):
    """The engine does not take the options it was given."""


class Session(Protocol):
    """A loaded engine."""

    def run(self, items: list[Item]) -> list[list[int]]:
        """Greedy tokens of requests submitted at once, exactly as many for each as it asks for."""
        ...

    def close(self) -> None:
        """Ends what was started."""
        ...


Load = Callable[[Job], Session]
Measure = Callable[[Job], dict[str, Any]]


def main(load: Load, batched: Measure | None = None) -> None:
    """Reads the job from the file named by the first argument and prints the result.

    Engines print freely, so their standard output is standard error here.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job.from_json(Path(sys.argv[1]).read_text("utf-8"))
    try:
        if job.kind == "batched":
            if batched is None:
                raise Refused("this engine has no benchmark tool of its own")
            found = batched(job)
        else:
            found = measure(load, job)
    except BaseException as error:  # SystemExit too: some libraries leave by it
        traceback.print_exc()
        refused = isinstance(error, Refused)
        message = str(error) if refused else f"{type(error).__name__}: {error}"
        found = {"error": message.strip(), "refused": refused}
    print(json.dumps(found), file=out, flush=True)
    # Some engines hang in their own clean-up; the result is out, and the parent ends the group.
    os._exit(1 if "error" in found else 0)


def measure(load: Load, job: Job) -> dict[str, Any]:
    """Loads the engine, runs the job and counts.

    Returns:
        seconds (from submission to the last token), start_seconds (from the start of the process to
        the end of the first thing it ran), tokens of each request, peak_rss_bytes of the engine's
        processes.
    """
    session = load(job)
    try:
        if job.kind == "throughput":
            _run(session, job.warm_up, job.sequential)
        started = time.monotonic()
        tokens = _run(session, job.items, job.sequential)
        ended = time.monotonic()
        peak = peak_rss(getattr(session, "pids", None))
    finally:
        session.close()
    for item, got in zip(job.items, tokens, strict=True):
        if len(got) != item.output:
            raise RuntimeError(f"a request brought {len(got)} of {item.output} tokens")
    return {
        "seconds": ended - started,
        "start_seconds": ended - getattr(session, "spawned", job.spawned),
        "tokens": tokens,
        "peak_rss_bytes": peak,
        "notes": getattr(session, "notes", {}),
    }


def _run(session: Session, items: list[Item], sequential: bool) -> list[list[int]]:
    if sequential:
        return [tokens for item in items for tokens in session.run([item])]
    return session.run(items)


def peak_rss(pids: Iterable[int] | None = None) -> int | None:
    """Bytes: the sum of the peaks of this process and all it started (or of `pids`); None where
    /proc is not there. Pages that two of them share count twice."""
    found = [_peak(pid) for pid in (_family(os.getpid()) if pids is None else pids)]
    known = [peak for peak in found if peak is not None]
    return sum(known) if known else None


def _peak(pid: int) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _family(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(member for child in children for member in _family(child))]
