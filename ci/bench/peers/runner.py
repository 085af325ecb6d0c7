"""All engines, all works, all runs: what is known is kept, what fails is a row, the rest goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.engines import Engine, Places, Prepared
from peers.job import Job
from peers.measure import measure
from peers.processes import PeerError
from peers.store import Result, Store

_UNKNOWN = "unknown"

Measure = Callable[..., Result]


@dataclass(frozen=True)
class Settings:
    """fresh: measure again what is known. redo_disturbed: only what was not measured on an idle
    machine. timeout, wait: seconds, of a run and for an idle machine."""

    work_folder: Path
    runs: int = 3
    fresh: bool = False
    redo_disturbed: bool = False
    timeout: float = 1800.0
    wait: float = 300.0


@dataclass(frozen=True)
class _Task:
    engine: Engine
    prepared: Prepared
    job: Job
    run: int


class Runner:
    """Runs engines on works and keeps every result in a store.

    Args:
        engines: those that cannot be made ready are rows that say why.
        jobs: work -> what every engine is asked for; engine.first cuts it.
        take: makes a result of an engine, a job and a run.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        jobs: Mapping[str, Job],
        places: Places,
        store: Store,
        settings: Settings,
        take: Measure = measure,
    ) -> None:
        self._store, self._settings, self._take = store, settings, take
        self._unready: list[Result] = []
        self._tasks = list(_plan(engines, jobs, self._prepare(engines, jobs, places), settings))

    def _prepare(
        self, engines: Sequence[Engine], jobs: Mapping[str, Job], places: Places
    ) -> dict[str, Prepared]:
        prepared: dict[str, Prepared] = {}
        for engine in engines:
            try:
                prepared[engine.name] = engine.prepare(places)
            except Exception as error:  # whatever it is, the other engines go on
                print(f"{engine.name} cannot run: {_told_error(error)}", flush=True)
                self._unready += [
                    Result(engine.name, _UNKNOWN, work, 1, "", "failed", _told_error(error))
                    for work in jobs
                    if work in engine.works
                ]
        return prepared

    def run(self) -> None:
        """Measures what is not known yet.

        After a run that failed, the same engine gets the same work no more; a failure of an earlier
        call is tried again.
        """
        given_up: set[tuple[str, str]] = set()
        started, measured = time.monotonic(), 0
        left = sum(self._stored(task) is None for task in self._tasks)
        for number, task in enumerate(self._tasks, start=1):
            key = task.engine.name, task.job.work
            if key in given_up or self._stored(task) is not None:
                continue
            eta = _remaining(time.monotonic() - started, measured, left)
            print(f"[{number}/{len(self._tasks)}] {' '.join(key)} run {task.run}{eta}", flush=True)
            result = self._measure(task)
            measured += 1
            print(f"    {told(result)}", flush=True)
            if result.status != "ok":
                given_up.add(key)

    def known(self) -> list[Result]:
        """All results that are stored, failures too, and the engines that could not be made ready."""
        found = [self._load(task) for task in self._tasks]
        return [*self._unready, *(result for result in found if result is not None)]

    def _load(self, task: _Task) -> Result | None:
        name, version = task.engine.name, task.prepared.version
        return self._store.load(name, version, task.job.work, task.job.digest(), task.run)

    def _stored(self, task: _Task) -> Result | None:
        found = self._load(task)
        if found is None or self._settings.fresh or found.status != "ok":
            return None
        return None if found.disturbed and self._settings.redo_disturbed else found

    def _measure(self, task: _Task) -> Result:
        result = self._take(
            task.engine.name,
            task.prepared,
            task.job,
            task.run,
            work_folder=self._settings.work_folder,
            timeout=self._settings.timeout,
            wait=self._settings.wait,
        )
        self._store.save(result)
        return result


def _plan(
    engines: Sequence[Engine],
    jobs: Mapping[str, Job],
    prepared: Mapping[str, Prepared],
    settings: Settings,
) -> Iterator[_Task]:
    """Run by run and work by work, so that a slow change of the machine meets all engines alike."""
    for run in range(settings.runs + 1):
        for work, job in jobs.items():
            if run == 0 and job.kind != "startup":
                continue
            for engine in engines:
                ready = prepared.get(engine.name)
                if ready is not None and work in engine.works:
                    part = job.first(engine.first.get(work)).with_options(ready.options)
                    yield _Task(engine, ready, part, run)


def _told_error(error: Exception) -> str:
    return str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"


def _remaining(seconds: float, done: int, all_of_them: int) -> str:
    if not done:
        return ""
    return f" (about {seconds / done * (all_of_them - done) / 60:.0f} min left)"


def told(result: Result) -> str:
    """A result in one line."""
    if result.status != "ok":
        return f"{result.status}: {result.reason}"
    figures = [f"{value:.2f} {name}" for name, value in result.values.items()]
    figures += [
        f"{row['width']:.0f} wide: {row['prefill']:.1f} prefill, {row['decode']:.1f} decode"
        for row in result.batched
    ]
    disturbed = f"; not idle: {result.disturbed}" if result.disturbed else ""
    return f"{', '.join(figures)}; {result.wall_seconds:.0f} s in all{disturbed}"
