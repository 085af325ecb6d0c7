"""A case: one thing a backend must do, with numbers drawn from its own name."""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octavo.plugins.conformance.scorecard import Group, Result

if TYPE_CHECKING:
    from octavo.plugins.conformance.subject import Subject

Dice = np.random.Generator


class Failed(AssertionError):
    """The backend did something else than it must. error, tolerance: how far off it was."""

    def __init__(
        self, message: str, error: float | None = None, tolerance: float | None = None
    ) -> None:
        super().__init__(message)
        self.error, self.tolerance = error, tolerance


class NotOffered(Exception):
    """What the case asks for is not declared, so nothing was asked of the backend."""


class Refused(Exception):
    """The engine refuses at the start what the case would ask of this backend."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a passed case measured."""

    error: float | None = None
    tolerance: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """`body(subject, dice)` returns what it found, or raises. `id` seeds the dice, so a case repeats."""

    group: Group
    op: str
    dtype: str
    aspect: str
    number: int
    body: Callable[[Subject, Dice], Finding] = field(repr=False)

    @property
    def id(self) -> str:
        return "/".join(p for p in (self.op, self.dtype, self.aspect, str(self.number)) if p)

    def dice(self) -> Dice:
        """The source of all that the case draws."""
        return np.random.default_rng(zlib.crc32(self.id.encode()))

    def run(self, subject: Subject) -> Result:
        """Runs the case; whatever it raises becomes its result."""
        started = time.perf_counter()
        error = tolerance = None
        try:
            found = subject.execute(self)
            state, detail = "passed", found.detail
            error, tolerance = found.error, found.tolerance
        except Failed as failed:
            state, detail = "failed", str(failed)
            error, tolerance = failed.error, failed.tolerance
        except NotOffered as reason:
            state, detail = "not offered", str(reason)
        except Refused as reason:
            state, detail = "refused", str(reason)
        except Exception as raised:
            where = _place(raised, subject.packages)
            state = "failed"
            detail = f"it raised {type(raised).__name__}: {_line(raised)}{where}"
        return Result(
            self.id,
            self.group,
            self.op,
            self.dtype,
            state,  # type: ignore[arg-type]  # a literal that mypy widens
            detail,
            error,
            tolerance,
            time.perf_counter() - started,
        )


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "without a message"


def _place(error: Exception, packages: Sequence[str]) -> str:
    """` (package/file.py:12)`: the innermost line of these packages that an error came through, or nothing."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = str(frame.f_globals.get("__name__"))
        if any(f"{module}.".startswith(f"{package}.") for package in packages):
            path = Path(frame.f_code.co_filename)
            folder = module if path.stem == "__init__" else module.rpartition(".")[0]
            return f" ({'/'.join([*filter(None, folder.split('.')), path.name])}:{line})"
    return ""


def within(what: str, error: float, tolerance: float, detail: str = "") -> Finding:
    """The finding of a measured error. Raises Failed beyond the tolerance; NaN is beyond any."""
    if not error <= tolerance:
        raise Failed(f"{what}: error {error:.3g} exceeds {tolerance:.3g}", error, tolerance)
    return Finding(error, tolerance, detail)


def demand(held: bool, message: str) -> None:
    """Raises Failed unless it held."""
    if not held:
        raise Failed(message)
