"""What the benchmarks share: percentiles, columns of text, JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from octavo.core.entry.cli.failure import CommandFailed

PERCENTILES = (50, 90, 95, 99)
COLUMNS = ("mean", *(f"p{p}" for p in PERCENTILES))


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of `values`, in their unit; empty when there are none.

    Percentiles are interpolated linearly between the two nearest ranks, as numpy's default.
    """
    if not values:
        return {}
    if len(values) == 1:
        return dict.fromkeys(COLUMNS, float(values[0]))
    cuts = quantiles(values, n=100, method="inclusive")
    return {"mean": fmean(values), **{f"p{p}": cuts[p - 1] for p in PERCENTILES}}


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells under each other: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table; the first row is its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def milliseconds(seconds: float | None) -> str:
    """A cell: seconds as milliseconds with three digits or more, "-" for none."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes a record.

    Raises:
        CommandFailed: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", "utf-8")
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error}") from error
