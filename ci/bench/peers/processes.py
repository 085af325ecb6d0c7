"""Commands in process groups of their own, which end when the command, its time or this process does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_GRACE_SECONDS = 5.0
_QUOTED_LINES = 3


class PeerError(Exception):
    """A peer could not be installed or measured. Its row says why, and the others go on."""


@contextlib.contextmanager
def group(
    command: Sequence[str], out: Path, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a group of its own, killed with all it started when the block is left.

    Args:
        out: takes standard output; log: standard error. They may be the same file. Files and not
            pipes: a grandchild that lives on would keep a pipe open and its reader waiting.
        environment: variables beside those of this process.
    """
    for file in (out, log):
        file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as files:
        error = files.enter_context(log.open("wb"))
        output = error if out == log else files.enter_context(out.open("wb"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=error,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Asks everything in the process' group to leave, and after a while makes it."""
    for kind, patience in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, _GRACE_SECONDS)):
        deadline = time.monotonic() + patience
        try:
            os.killpg(process.pid, kind)
            while time.monotonic() < deadline:
                process.poll()  # a dead child that nobody waits for would count as alive
                os.killpg(process.pid, 0)
                time.sleep(0.02)
        except (ProcessLookupError, PermissionError):
            break
    process.wait()


def run_logged(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 7200.0,
) -> None:
    """Runs a step of an installation.

    Raises:
        PeerError: it failed or took more than `timeout` seconds; with the end of its output.
    """
    with group(command, log, log, environment) as process:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise PeerError(f"{_short(command)} took more than {timeout:g} s (see {log})") from None
    if code:
        raise PeerError(f"{_short(command)} ended with exit code {code}: {tail(log)}")


def _short(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:5]])


def tail(log: Path) -> str:
    """The last lines of a log, as one."""
    try:
        lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    except OSError:
        return "no output"
    return " | ".join(line.strip() for line in lines[-_QUOTED_LINES:])[-400:] or "no output"
