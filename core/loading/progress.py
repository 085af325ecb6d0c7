"""How long-running loading reports how far it is.

Loading code sees only the two protocols; who shows the bar, and whether, is the caller's choice.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.progress


class Task(Protocol):
    """One phase that is under way."""

    def advance(self, n: int) -> None:
        """Say that ``n`` more units (bytes, tensors) are done."""

    def close(self) -> None:
        """Say that the phase is over, finished or not."""


class Progress(Protocol):
    """Where phases are announced."""

    def task(self, description: str, total: int | None) -> Task:
        """Begin a phase of ``total`` units; None when the amount is not known yet."""


class _SilentTask:
    def advance(self, n: int) -> None:
        pass

    def close(self) -> None:
        pass


class SilentProgress:
    """Shows nothing."""

    def task(self, description: str, total: int | None) -> Task:
        return _SilentTask()


class _LineProgress:
    """One line per phase: what a log file can bear."""

    def task(self, description: str, total: int | None) -> Task:
        size = f" ({total / 1e6:.0f} MB)" if total and total > 1_000_000 else ""
        print(f"{description}{size}", file=sys.stderr, flush=True)
        return _SilentTask()


class _RichTask:
    def __init__(self, bars: rich.progress.Progress, description: str, total: int | None) -> None:
        self._bars = bars
        self._id = bars.add_task(description, total=total)

    def advance(self, n: int) -> None:
        self._bars.advance(self._id, n)

    def close(self) -> None:
        self._bars.stop_task(self._id)
        if all(task.stop_time is not None for task in self._bars.tasks):
            self._bars.stop()


class _RichProgress:
    """Bars on a terminal; started with the first open phase, stopped with the last."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )

    def task(self, description: str, total: int | None) -> Task:
        self._bars.start()
        return _RichTask(self._bars, description, total)


def console_progress() -> Progress:
    """Bars on stderr if it is a terminal, else one line per phase."""
    return _RichProgress() if sys.stderr.isatty() else _LineProgress()
