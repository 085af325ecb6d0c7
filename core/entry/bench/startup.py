"""From the start of a process to its first token, with warm file caches, part by part.

Every run is a fresh process. The parts follow each other and add up to the whole; for a server, whose
engine loads in a process of its own while HTTP already answers, the engine's phases are told beside.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from octavo.core.entry.bench import plots
from octavo.core.entry.bench.http_client import Client
from octavo.core.entry.bench.load import run_load
from octavo.core.entry.bench.server_process import API_KEY, ServerProcess, served_model
from octavo.core.entry.bench.startup_child import PROMPT
from octavo.core.entry.bench.stats import columns
from octavo.core.entry.cli.failure import CommandFailed

CHILD = (sys.executable, "-m", "octavo.core.entry.bench.startup_child")

NOTE = """\
Seconds in fresh processes, with the model's files in the page cache. generate: start Python = spawned
to its first line, import = to the engine's API, tokenizer = finding files and loading the tokenizer
(what the engine's own phases leave of the loading), then these phases, first token = prompt to token.
serve: listen = spawned to the first answer of any kind, load = to /health 200, first token = request
to token; the engine loads in a process of its own, so its phases overlap listen and load."""


@dataclass(frozen=True)
class Start:
    """One start. `parts` follow each other, in seconds; `phases` are the engine's own."""

    parts: dict[str, float]
    phases: dict[str, float] = field(default_factory=dict)
    model: str = ""

    @property
    def total(self) -> float:
        """Seconds from the start of the process to its first token."""
        return sum(self.parts.values())


def start_generate(arguments: Sequence[str], child: Sequence[str] = CHILD) -> Start:
    """Runs what `octavo generate` runs.

    Args:
        arguments: the engine's options.

    Raises:
        CommandFailed: the process failed.
    """
    spawned = time.monotonic()
    done = subprocess.run(
        [*child, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-3:]
        raise CommandFailed(f"the process ended with {done.returncode}: {' | '.join(lines)}")
    found = json.loads(done.stdout.splitlines()[-1])
    phases: dict[str, float] = found["phases"]
    loading = found["loaded"] - found["imported"]
    parts = {
        "start Python": found["begun"] - spawned,
        "import": found["imported"] - found["begun"],
        "tokenizer": loading - sum(phases.values()),
        **phases,
        "first token": found["first_token"] - found["loaded"],
    }
    return Start(parts, phases, found["model"])


async def start_server(server: ServerProcess, timeout: float = 600.0) -> Start:
    """Waits for a server just spawned and asks it for a token.

    Raises:
        CommandFailed: it ended, was not ready in time, or refused the request.
    """
    client = Client(server.url, API_KEY)
    try:
        await server.wait_ready(client, timeout)
        model = await served_model(client)
        request = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = msgspec.json.encode(request)
        run = await run_load(client, "/completions", [body], [0.0], timeout=timeout)
    finally:
        client.close()
    if not run.good:
        raise CommandFailed(f"the server's first answer failed: {run.samples[0].message}")
    parts = {
        "listen": server.listening - server.spawned,
        "load": server.ready - server.listening,
        "first token": run.samples[0].ttft,
    }
    return Start(parts, banner_phases(server.output), model)


def banner_phases(text: str) -> dict[str, float]:
    """The engine's phases from what a server prints when it is ready; empty without it."""
    found = re.search(r"start-up [\d.]+ s \((.*)\)$", text, re.MULTILINE)
    pairs = re.findall(r"([^,]+?) ([\d.]+)(?:, |$)", found[1]) if found else []
    return {name: float(seconds) for name, seconds in pairs}


def repeated(
    start: Callable[[list[str]], Start], arguments: list[str], repeats: int, warm_up: int
) -> list[Start]:
    """Starts again and again; the first `warm_up` only fill the page cache."""
    return [start(arguments) for _ in range(warm_up + repeats)][warm_up:]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": fmean(values), "median": median(values), "min": min(values), "max": max(values),
    }  # fmt: skip


def values(starts: Sequence[Start]) -> dict[str, Any]:
    """Parts, phases and total over all starts, in seconds, for JSON."""

    def each(which: str) -> dict[str, Any]:
        names = dict.fromkeys(name for start in starts for name in getattr(start, which))
        return {
            name: _spread([getattr(start, which).get(name, 0.0) for start in starts])
            for name in names
        }

    return {
        "total": _spread([start.total for start in starts]),
        "parts": each("parts"),
        "engine_phases": each("phases"),
        "runs": [{"total": s.total, "parts": s.parts, "phases": s.phases} for s in starts],
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """What was started -> its parts in rows, in seconds."""
    rows: list[tuple[str, ...]] = [("seconds", "mean", "median", "min", "max")]
    for name, record in found.items():
        rows.append((f"{name}: to the first token", *_cells(record["total"])))
        rows += [(f"  {part}", *_cells(spread)) for part, spread in record["parts"].items()]
        if name == "serve":
            rows += [
                (f"    engine: {phase}", *_cells(spread))
                for phase, spread in record["engine_phases"].items()
            ]
    return f"{columns(rows)}\n\n{NOTE}"


def _cells(spread: dict[str, float]) -> tuple[str, ...]:
    return tuple(f"{spread[column]:.3f}" for column in ("mean", "median", "min", "max"))


def plot(folder: Path, found: dict[str, dict[str, Any]], title: str) -> list[Path]:
    """A bar for each, made of the means of its parts."""
    written: list[Path] = []
    with plots.figure(folder, "startup", title, panels=len(found), written=written) as panels:
        for axes, (name, record) in zip(panels, found.items(), strict=True):
            left, colors = 0.0, plots.colors(len(record["parts"]))
            for color, (part, spread) in zip(colors, record["parts"].items(), strict=True):
                label = f"{part} {spread['mean']:.2f} s"
                axes.barh([0], [spread["mean"]], left=left, label=label, color=color)
                left += spread["mean"]
            axes.set(title=f"{name}: {left:.2f} s", xlabel="seconds since the start of the process")
            axes.set_yticks([])
            axes.set_ylim(-0.5, 1.6)  # room for the legend above the bar
            axes.legend(loc="upper left", fontsize="small", ncols=2)
    return written
