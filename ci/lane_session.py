"""Runs one lane inside a nox session: makes its environment, runs its steps, and writes what they had to show."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lane_results
from lanes import ROOT, Lane, Step

RESULTS = ROOT / "build/lanes"
CACHE = ROOT / "build"
PROJECT = ROOT / ".venv"


def out_of(lane: Lane) -> Path:
    """The folder of the lane's results."""
    return RESULTS / lane.name


def site_packages(python: Path) -> Path:
    """The folder into which packages of that interpreter go."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(found.stdout.strip())


def install(session: Any, lane: Lane) -> None:
    """What the lane's environment needs. Nothing is installed into the project's own."""
    if lane.environment == "project":
        return
    pip: list[str] = ["--disable-pip-version-check", "--quiet"]
    if lane.environment == "layer":
        # Everything of the project's environment, its editable install included, is seen from here.
        below = site_packages(PROJECT / "bin/python")
        mine = site_packages(Path(session.virtualenv.location) / "bin/python")
        (mine / "project.pth").write_text(
            f"import site; site.addsitedir({str(below)!r})\n", "utf-8"
        )
        pip += ["-c", "constraints.txt"]
    if lane.requirements_file is not None:
        session.install(*pip, "-r", str(lane.requirements_file))
    if lane.environment in ("own", "machine"):
        session.install(*pip, "-e", ".[dev]")
    for package in lane.packages:
        session.install(*pip, "--no-deps", f"./{package}")


def run_step(
    lane: Lane, number: int, step: Step, bin_folder: Path, more: list[str]
) -> tuple[int, list[str]]:
    """Runs one step, its output shown and kept; returns (things done, faults)."""
    out = out_of(lane)
    words = shlex.split(step.command.format(out=out, cache=CACHE))
    report = out / f"{number}.xml"
    if words[0] == "pytest":
        words = ["python", "-m", *words, f"--junitxml={report}"]
    elif words[:3] == ["octavo", "backend", "check"]:
        report = out / f"{number}.json"
        words += ["--json", str(report)]
    words = [str(bin_folder / words[0]), *words[1:], *more]
    print("$", shlex.join(words), flush=True)
    path = f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"
    text: list[str] = []
    with subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, "PATH": path, "VIRTUAL_ENV": str(bin_folder.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            text.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()
    (out / f"{number}.log").write_text("".join(text), "utf-8")
    if report.suffix == ".json":
        count, faults = lane_results.of_scorecard(report)
    elif "pytest" in words:
        count, faults = lane_results.of_junit(report, lane.skips)
    else:
        count, faults = lane_results.of_output("".join(text), step.proof)
    if process.returncode:
        faults.insert(0, f"`{step.command}` ended with status {process.returncode}")
    return count, faults


def run(session: Any, lane: Lane) -> None:
    """The session's body. Fails the session when the lane has a fault."""
    out = out_of(lane)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    result = lane_results.Result(lane.name, faults=["its environment could not be made"])
    result.write(out / "result.json")
    if lane.environment in ("project", "layer") and not (PROJECT / "bin/python").exists():
        session.error("there is no .venv: run `make setup` first")
    install(session, lane)
    home = PROJECT if lane.environment == "project" else Path(session.virtualenv.location)
    tests = any(step.command.startswith("pytest") for step in lane.steps)
    result.faults = []
    began, before = time.monotonic(), os.times()
    for number, step in enumerate(lane.steps):
        # Arguments of the caller are for pytest, where the lane has any.
        more = session.posargs if step.command.startswith("pytest") or not tests else []
        count, faults = run_step(lane, number, step, home / "bin", list(more))
        result.count += count
        result.faults += faults
    after = os.times()
    result.seconds = round(time.monotonic() - began, 1)
    used = after.children_user + after.children_system
    result.cpu_seconds = round(used - before.children_user - before.children_system, 1)
    result.write(out / "result.json")
    if result.faults:
        session.error("\n".join(result.faults))
