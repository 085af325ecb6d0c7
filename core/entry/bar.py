"""A bar on standard error for many prompts: how many are done, and tokens a second."""

from __future__ import annotations

import sys
from typing import Any, Self


class Bar:
    """Shown when wanted, when there is something to show, and when a terminal is there to see it.

    total: prompts; None: not known.
    """

    def __init__(self, total: int | None, wanted: bool = True) -> None:
        self._progress: Any = None
        self._tokens = 0
        if wanted and total != 0 and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            self._progress = Progress(
                TextColumn("prompts"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[rate]:.1f} tokens/s"),
                console=Console(stderr=True),
            )
            self._task = self._progress.add_task("", total=total, rate=0.0)

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def advance(self, tokens: int) -> None:
        """One more prompt is done, with as many new tokens."""
        if self._progress:
            self._tokens += tokens
            elapsed = self._progress.tasks[0].elapsed or 1e-9
            self._progress.update(self._task, advance=1, rate=self._tokens / elapsed)
