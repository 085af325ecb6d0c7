"""The ways there are to multiply by a model's weights, beside each other."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError
from octavo.core.entry.bench.stats import columns, markdown, milliseconds

if TYPE_CHECKING:
    import torch

    from octavo.core.contract import WeightSpec
    from octavo.core.instruments import LinearPath, Product

WEIGHTS_BYTES, MOST_COPIES = 64 << 20, 32
"""Each weight is there several times, as a model has layers: a cache would flatter a single one."""
_PASS_SECONDS = 0.02
_MOST_HEAD_ROWS = 64  # logits are made for the tokens that are drawn, never for a whole prompt

NOTE = """\
GFLOP/s = 2 x rows x outputs x inputs / seconds of the fastest product in interleaved passes over copies of
each weight; x and results are float32, conversions included. * the fastest."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [n, k]; `count` is how often the model has it."""

    n: int
    k: int
    count: int
    head: bool

    def __str__(self) -> str:
        return f"{self.n} x {self.k}" + (" (head)" if self.head else "")


@dataclass
class Case:
    """A shape, a format and a number of rows: seconds of a product by each path, None where it fails."""

    shape: Shape
    format: str
    rows: int
    seconds: dict[str, float | None] = field(default_factory=dict)

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=lambda name: self.seconds[name] or float("inf"))

    def gflops(self, name: str) -> float | None:
        seconds = self.seconds.get(name)
        if not seconds:
            return None
        return 2e-9 * self.rows * self.shape.n * self.shape.k / seconds


def shapes_of(specs: Iterable[WeightSpec]) -> list[Shape]:
    """The products of a model, each kind once."""
    products = (spec for spec in specs if spec.role in ("linear", "head"))
    found = Counter((spec.shape, spec.role) for spec in products)
    return [Shape(n, k, count, role == "head") for ((n, k), role), count in found.items()]


def chosen(
    paths: Sequence[LinearPath], formats: Sequence[str] | None
) -> dict[str, list[LinearPath]]:
    """The paths of each format asked for (None: all).

    Raises:
        ConfigError: a format that no path has.
    """
    found: dict[str, list[LinearPath]] = {}
    for path in paths:
        found.setdefault(path.format, []).append(path)
    if unknown := set(formats or ()) - set(found):
        raise ConfigError(
            f"--formats {', '.join(sorted(unknown))}: this device has {', '.join(found)}"
        )
    return {name: found[name] for name in (formats or found)}


def measure(
    shapes: Sequence[Shape],
    paths: dict[str, list[LinearPath]],
    rows: Sequence[int],
    passes: int,
    progress: Callable[[str], None],
) -> list[Case]:
    """Times every path of each format on every shape with every number of rows.

    Raises:
        RuntimeError: a path whose results are wrong: its speed would say nothing.
    """
    import torch

    found = []
    dice = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        for (form, of_format), shape in itertools.product(paths.items(), shapes):
            progress(f"{form} {shape}")
            weight = torch.randn(shape.n, shape.k, generator=dice) * shape.k**-0.5
            runners = {path.name: _Runner(path, weight) for path in of_format}
            for count in rows:
                if shape.head and count > _MOST_HEAD_ROWS:
                    continue
                x = torch.randn(count, shape.k, generator=dice)
                best: dict[str, float | None] = dict.fromkeys(runners)
                for _, (name, runner) in itertools.product(range(passes), runners.items()):
                    if (seconds := runner.seconds(x)) is not None:
                        best[name] = min(seconds, best[name] or seconds)
                found.append(Case(shape, form, count, best))
    return found


class _Runner:
    """One path with copies of one weight, used in turn."""

    def __init__(self, path: LinearPath, weight: torch.Tensor) -> None:
        self._products: list[Product] = []
        try:
            _check(path, path.pack(weight), weight)
            copies = min(MOST_COPIES, 1 + WEIGHTS_BYTES // (weight.numel() * 4))
            self._products = [path.pack(weight.clone()) for _ in range(copies)]
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, WrongResult):
                raise
        self._next = 0

    def seconds(self, x: torch.Tensor) -> float | None:
        """Of the fastest product of a pass; None when the library refuses the shape."""
        if not self._products:
            return None
        self._call(x)  # whose threads may still sleep
        fastest, end = float("inf"), time.perf_counter() + _PASS_SECONDS
        for _ in self._products:
            started = time.perf_counter()
            self._call(x)
            now = time.perf_counter()
            fastest = min(fastest, now - started)
            if now > end:
                break
        return fastest

    def _call(self, x: torch.Tensor) -> None:
        self._products[self._next](x)
        self._next = (self._next + 1) % len(self._products)


class WrongResult(RuntimeError):
    """A path whose results are not the product."""


def _check(path: LinearPath, product: Product, weight: torch.Tensor) -> None:
    import torch

    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(4))
    want = x @ weight.T
    off = float((product(x) - want).abs().max() / want.abs().max())
    if not off <= path.tolerance:
        raise WrongResult(
            f"{path.name} ({path.format}) is off by {off:.2g} of the largest result of a product with "
            f"{tuple(weight.shape)}; {path.tolerance:g} would be right"
        )


def whole_model(cases: Sequence[Case]) -> dict[tuple[str, int], dict[str, float]]:
    """(format, rows) -> seconds of all the model's products by each path that has them all; the head
    with at most 64 rows."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for form, rows in dict.fromkeys((case.format, case.rows) for case in cases):
        used = [
            case
            for case in cases
            if case.format == form
            and case.rows == (min(rows, _MOST_HEAD_ROWS) if case.shape.head else rows)
        ]
        names = [name for name in used[0].seconds if all(case.seconds[name] for case in used)]
        if {case.shape for case in used} == {case.shape for case in cases}:
            found[form, rows] = {
                name: sum(case.shape.count * (case.seconds[name] or 0.0) for case in used)
                for name in names
            }
    return found


def table(cases: Sequence[Case], *, as_markdown: bool = False) -> str:
    """GFLOP/s of each path, format by format, and the time of all products of the model."""
    render = markdown if as_markdown else columns
    totals, parts = whole_model(cases), []
    for form in dict.fromkeys(case.format for case in cases):
        own = [case for case in cases if case.format == form]
        names = list(own[0].seconds)
        rows: list[tuple[str, ...]] = [(f"{form}: GFLOP/s", "rows", *names)]
        for case in own:
            cells = []
            for name in names:
                value = case.gflops(name)
                mark = " *" if name == case.fastest else ""
                cells.append("-" if value is None else f"{value:.1f}{mark}")
            rows.append((str(case.shape), str(case.rows), *cells))
        for (of_form, count), seconds in totals.items():
            if of_form == form:
                cells = [milliseconds(seconds.get(name)) for name in names]
                rows.append(("whole model, ms", str(count), *cells))
        parts.append(render(rows))
    return "\n\n".join([*parts, NOTE])


def record(cases: Sequence[Case], refused: dict[str, str]) -> dict[str, Any]:
    """Everything as plain values for JSON."""
    return {
        "cases": [
            {
                "format": case.format,
                "n": case.shape.n,
                "k": case.shape.k,
                "count": case.shape.count,
                "rows": case.rows,
                "seconds": case.seconds,
                "gflops": {name: case.gflops(name) for name in case.seconds},
                "fastest": case.fastest,
            }
            for case in cases
        ],
        "whole_model_seconds": [
            {"format": form, "rows": rows, "seconds": seconds}
            for (form, rows), seconds in whole_model(cases).items()
        ],
        "not_measured": refused,
        "note": NOTE,
    }
