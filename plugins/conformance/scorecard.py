"""What a backend was found to do: one frozen record, from which the terminal, JSON, HTML, the support
matrix and `GET /v1/capabilities` are made. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Group = Literal["contract", "op", "engine"]
State = Literal["passed", "failed", "not offered", "refused", "compiled"]
Execution = Literal["device", "stand-in", "interpreted", "compiled"]

EXECUTIONS: Mapping[str, str] = {
    "device": "executed on a device",
    "stand-in": "executed on a stand-in for the device",
    "interpreted": "executed by an interpreter of the device's code",
    "compiled": "compiled only, not executed",
}

FORMAT = 1
"""Counts changes of the JSON that an older reader would misread."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one case ended. `error` and `tolerance` are in the units of its check; None: it has none."""

    id: str
    group: Group
    op: str
    dtype: str
    state: State
    detail: str = ""
    error: float | None = None
    tolerance: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """All cases of one op (or contract rule, or way through the engine) and dtype together.

    error: the worst, and `tolerance` that of the same case. failing: the first failed case's id, which is
    the seed of all that it draws. speed: how many times faster than the portable op on the same device, and
    `speed_at` of which shape.
    """

    group: Group
    op: str
    dtype: str
    state: State
    cases: int
    failures: int = 0
    error: float | None = None
    tolerance: float | None = None
    failing: str | None = None
    command: str | None = None
    detail: str = ""
    speed: float | None = None
    speed_at: str = ""
    execution: Execution = "device"
    runs: str = ""


@dataclass(frozen=True, slots=True)
class Scorecard:
    """One run of the kit over one backend. `seconds` is how long it took."""

    backend: str
    device: str
    distribution: str
    version: str
    contract: tuple[int, int]
    execution: Execution
    full: bool
    seconds: float
    rows: tuple[Row, ...]
    capabilities: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.state == "failed")

    def count(self, state: State) -> int:
        """Rows in this state."""
        return sum(row.state == state for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as JSON keeps it."""
        return json.loads(json.dumps({"format": FORMAT, **asdict(self)}, default=list))  # type: ignore[no-any-return]

    def write(self, path: Path) -> None:
        """Writes the JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n", "utf-8")


def read(path: Path) -> Scorecard:
    """A scorecard from its JSON.

    Raises:
        ValueError: another format.
    """
    return from_dict(json.loads(path.read_text("utf-8")))


def from_dict(data: Mapping[str, Any]) -> Scorecard:
    """The inverse of `Scorecard.as_dict`."""
    if data.get("format") != FORMAT:
        raise ValueError(f"scorecard format {data.get('format')!r}; this release reads {FORMAT}")
    values = {name: data[name] for name in Scorecard.__slots__}
    major, minor = values["contract"]
    rows = tuple(Row(**row) for row in values["rows"])
    return Scorecard(**{**values, "contract": (major, minor), "rows": rows})


def execution_of(notes: Mapping[str, str], op: str) -> Execution:
    """Where an op was executed, by the note `execution`: one word for all ops, then exceptions, as in
    `interpreted; rotary: compiled`. Without one: on the device. In parentheses behind a word a backend may name what
    it ran on (`remark_of`).

    Raises:
        ValueError: a word that is none of `EXECUTIONS`.
    """
    found = "device"
    for part in notes.get("execution", "device").split(";"):
        name, colon, word = part.strip().rpartition(":")
        if not colon or name.strip() == op:
            found = word.partition("(")[0].strip()
    if found not in EXECUTIONS:
        raise ValueError(
            f"the capability note execution says {found!r} of {op}; it may say {', '.join(EXECUTIONS)}"
        )
    return found  # type: ignore[return-value]


def remark_of(notes: Mapping[str, str]) -> str:
    """What the note `execution` says in parentheses behind its first word: `PJRT CPU` of `stand-in (PJRT CPU)`."""
    first = notes.get("execution", "").partition(";")[0]
    return first.partition("(")[2].rpartition(")")[0].strip()


def gathered(
    results: Sequence[Result],
    *,
    word: str,
    speeds: Mapping[tuple[str, str], tuple[float, str]],
    executions: Mapping[str, Execution],
    runs: Mapping[str, str],
) -> tuple[Row, ...]:
    """Results by op and dtype, in the order in which they first came."""
    by_row: dict[tuple[Group, str, str], list[Result]] = {}
    for result in results:
        by_row.setdefault((result.group, result.op, result.dtype), []).append(result)
    rows = []
    for (group, op, dtype), cases in by_row.items():
        failed = [c for c in cases if c.state == "failed"]
        states = {c.state for c in cases}
        state: State = "failed" if failed else "passed" if "passed" in states else cases[0].state
        measured = [c for c in failed or cases if c.error is not None]
        worst = max(measured, key=_badness, default=None)
        first = failed[0] if failed else None
        speed, speed_at = speeds.get((op, dtype), (None, ""))
        rows.append(
            Row(
                group=group,
                op=op,
                dtype=dtype,
                state=state,
                cases=sum(c.state in ("passed", "failed") for c in cases),
                failures=len(failed),
                error=worst.error if worst else None,
                tolerance=worst.tolerance if worst else None,
                failing=first.id if first else None,
                command=f"octavo backend check {word} --only '{first.id}'" if first else None,
                detail=first.detail if first else _details(cases),
                speed=speed,
                speed_at=speed_at,
                execution=executions.get(op, executions.get("", "device")),
                runs=runs.get(op, ""),
            )
        )
    return tuple(rows)


def _badness(case: Result) -> float:
    error, tolerance = case.error or 0.0, case.tolerance or 0.0
    if error != error:
        return float("inf")
    return error / tolerance if tolerance else error


def _details(cases: Sequence[Result]) -> str:
    return "; ".join(dict.fromkeys(c.detail for c in cases if c.detail))
