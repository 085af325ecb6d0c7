"""Running the kit: which cases there are, and the scorecard of a backend."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module

import octavo
from octavo.core.config import ConfigError
from octavo.core.contract import API_VERSION
from octavo.plugins import Backend, Ops
from octavo.plugins.conformance import scorecard
from octavo.plugins.conformance.case import Case
from octavo.plugins.conformance.scorecard import Result, Scorecard
from octavo.plugins.conformance.subject import Subject
from octavo.plugins.manager import Resolved, plugins

PARTS = (
    "contract_cases",
    "cache_cases",
    "layer_cases",
    "invariance_cases",
    "encoder_cases",
    "fused_cases",
    "sample_cases",
    "engine_cases",
)

METHODS = {
    "export_import_blocks": ("export_blocks", "import_blocks"),
    "store_packed": ("packed_key", "store_packed", "load_packed"),
}
"""The methods behind a row of the scorecard that has another name than its method."""
BRIEF = {"paged_attention": 2, "write_kv": 2}
"""How many cases of a kind an interpreted device gets, where it is more than one."""

Tell = Callable[[Result, int], None]
"""Told of each result as it comes, and of how many cases there are."""


def catalogue(subject: Subject, full: bool = False) -> list[Case]:
    """Every case for what the backend declares; --full has more of each. Case n of a row is the same in
    both. Where the device's code is interpreted, there are fewer of each kind, and they are smaller."""
    found: list[Case] = []
    for part in PARTS:
        module = import_module(f"octavo.plugins.conformance.{part}")
        found += module.cases(subject, full)
    if subject.brief and not full:
        found = [c for c in found if c.group != "op" or c.number < BRIEF.get(c.op, 1)]
    return found


def chosen(subject: Subject, full: bool, only: str | None) -> list[Case]:
    """The cases whose id matches a pattern: a part of it, or with * and ? all of it.

    Raises:
        ConfigError: none does.
    """
    found = catalogue(subject, full)
    if only is None:
        return found
    some = [c for c in found if matches(c.id, only)]
    if not some and not full:  # one of the longer check's, as its scorecard names it
        subject.full = True
        some = [c for c in catalogue(subject, True) if matches(c.id, only)]
    if not some:
        rows = ", ".join(dict.fromkeys(c.op for c in found))
        raise ConfigError(f"--only {only!r} matches no check; ids begin with {rows}")
    return some


def matches(name: str, pattern: str) -> bool:
    """Whether an id is meant by a pattern."""
    if any(c in pattern for c in "*?"):
        return fnmatch.fnmatchcase(name, pattern)
    # A whole id means that case alone, and not also those whose number begins alike.
    return name == pattern if pattern.rpartition("/")[2].isdigit() else pattern in name


def resolve(name: str, device: str | None = None) -> Resolved:
    """A backend by its own name or a device word, on the device asked for.

    Raises:
        ConfigError: there is none, or it has no device here.
    """
    found = plugins()
    words = {e.backend.name: e.backend.device_types[0] for e in found.backends}
    resolved = found.resolve(device or words.get(name, name))
    if name not in (resolved.backend.name, resolved.device, *resolved.backend.device_types):
        raise ConfigError(
            f"--device {device!r} belongs to backend {resolved.backend.name!r}, not to {name!r}"
        )
    return resolved


def distribution_of(backend: Backend) -> str:
    """The package that brought a backend; empty when it was handed over as an object."""
    entries = [e for e in plugins().backends if e.backend is backend]
    return entries[0].distribution if entries else ""


def check(
    backend: Backend,
    device: str,
    *,
    full: bool = False,
    only: str | None = None,
    word: str | None = None,
    tell: Tell | None = None,
    speed: bool = True,
) -> Scorecard:
    """Runs the kit over a backend.

    Args:
        full: more cases of each kind, and all pairs of dtypes.
        only: which cases; see `chosen`.
        word: how the scorecard's commands name the backend.
        tell: called with each result and the number of cases.
        speed: whether ops are timed against the portable ones.

    Raises:
        ConfigError: no case matches `only`, or the device cannot be used here.
    """
    started = time.perf_counter()
    subject = Subject(backend, device, word or device, full)
    some = chosen(subject, full, only)
    results = []
    for case in some:
        results.append(run_case(subject, case))
        if tell is not None:
            tell(results[-1], len(some))
    return summarised(subject, results, time.perf_counter() - started, full=full, speed=speed)


def run_case(subject: Subject, case: Case) -> Result:
    """Runs a case, unless its op can only be compiled here."""
    notes = subject.capabilities.notes
    if case.group == "op":
        try:
            execution = scorecard.execution_of(notes, case.op)
        except ValueError:
            execution = "device"  # a check of the contract has words for it
        if execution == "compiled":
            detail = "compiled, not executed"
            return Result(case.id, case.group, case.op, case.dtype, "compiled", detail)
    return case.run(subject)


def body_of(ops: Ops, row: str) -> str:
    """Whose body runs an op that `Capabilities.ops` does not tell: "portable", or the class that has its own."""
    names = METHODS.get(row, (row,))
    kind = type(ops)
    own = any(getattr(kind, n, None) is not getattr(Ops, n, None) for n in names)
    return kind.__name__ if own else "portable"


def summarised(
    subject: Subject, results: Sequence[Result], seconds: float, *, full: bool, speed: bool
) -> Scorecard:
    """The scorecard of results."""
    from octavo.plugins.conformance.speed import speeds

    caps = subject.capabilities
    ops = list(dict.fromkeys(r.op for r in results if r.group == "op"))
    executions = {}
    for op in ("", *ops):
        try:
            executions[op] = scorecard.execution_of(caps.notes, op)
        except ValueError:
            executions[op] = scorecard.execution_of({}, op)
    everything = subject.runs.get("every op", "")
    runs = {op: subject.runs.get(op) or everything or body_of(subject.ops, op) for op in ops}
    wanted = [(r.op, r.dtype) for r in results if r.group == "op" and r.state == "passed"]
    rows = scorecard.gathered(
        results,
        word=subject.word,
        speeds=speeds(subject, dict.fromkeys(wanted)) if speed else {},
        executions=executions,
        runs=runs,
    )
    return Scorecard(
        backend=subject.backend.name,
        device=subject.device,
        distribution=distribution_of(subject.backend),
        version=octavo.__version__,
        contract=API_VERSION,
        execution=executions[""],
        full=full,
        seconds=round(seconds, 1),
        rows=rows,
        capabilities=asdict(caps),
    )
