"""Whether an engine gets on: when its last step was, and what it last said of itself."""

from __future__ import annotations

import time
from typing import Any


class Pulse:
    """Fed with what comes from one engine. Whoever watches it asks for statistics now and then, so
    that an engine that works without having anything to say is told from one that hangs."""

    def __init__(self) -> None:
        self.stats: dict[str, Any] = {}
        """What the engine last said of itself; empty until then."""
        self.stats_at = 0.0
        self._progress_at = time.monotonic()
        self._idle = True

    def on_step(self) -> None:
        """A step brought something."""
        self._progress_at = time.monotonic()

    def on_stats(self, values: dict[str, Any]) -> None:
        """The engine answered. It stands between two steps; was there one since the last answer?"""
        before, self.stats, self.stats_at = self.stats, values, time.monotonic()
        self._idle = not values.get("running") and not values.get("waiting")
        if self._idle or values.get("steps") != before.get("steps"):
            self._progress_at = self.stats_at

    def on_request(self, others_open: bool) -> None:
        """A request goes to the engine. One that was idle until now has all its time before it."""
        self._idle = False
        if not others_open:
            self._progress_at = max(self._progress_at, time.monotonic())

    @property
    def silent_seconds(self) -> float:
        """Since the engine last finished a step, or said that it has nothing to do."""
        return time.monotonic() - self._progress_at
