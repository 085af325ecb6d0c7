"""A sweep of loads as tables and as figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.core.entry.bench import plots
from octavo.core.entry.bench.serving import FORMULAS, GOODPUT_KEYS
from octavo.core.entry.bench.stats import COLUMNS, columns, milliseconds

LATENCIES = ("ttft", "tpot", "itl", "e2e")
BUSY_CLIENT = 0.7
"""Share of a core from which on the client may be what is measured."""
_LATE_SECONDS = 0.02

Values = Sequence[Mapping[str, Any]]
"""`serving.Point.values` of each point."""


def tables(points: Values, limits: Mapping[str, float]) -> str:
    """Throughput and latency of each point, the formulas, and what went wrong."""
    head: tuple[str, ...] = ("rate", "limit", "ok", "errors", "in flight", "req/s", "out tok/s",
                             "total tok/s")  # fmt: skip
    rows = [head + (("good/s", "good") if limits else ())]
    for point in points:
        row: tuple[str, ...] = (
            *_name(point),
            str(point["succeeded"]),
            str(sum(point["errors"].values())),
            f"{point['mean_in_flight']:.1f}",
            f"{point['requests_per_second']:.2f}",
            f"{point['output_tokens_per_second']:.1f}",
            f"{point['total_tokens_per_second']:.1f}",
        )
        if limits:
            row += (f"{point['goodput_per_second']:.2f}", f"{point['goodput_share']:.0%}")
        rows.append(row)
    lines = [columns(rows), ""]
    latency: list[tuple[str, ...]] = [("rate", "limit", "ms", *COLUMNS)]
    for point in points:
        for key in LATENCIES:
            cells = (milliseconds(point[key].get(column)) for column in COLUMNS)
            latency.append((*_name(point), key.upper(), *cells))
    lines += [columns(latency), "", FORMULAS]
    if limits:
        wanted = ", ".join(f"{key} <= {limits[key]:g} ms" for key in GOODPUT_KEYS if key in limits)
        lines.append(f"limits: {wanted}")
    return "\n".join([*lines, *_notes(points)])


def _name(point: Mapping[str, Any]) -> tuple[str, str]:
    rate, limit = point["rate"], point["concurrency"]
    return rate if rate == "inf" else f"{rate:g}", "-" if limit is None else str(limit)


def _notes(points: Values) -> list[str]:
    notes = []
    for point in points:
        rate, limit = _name(point)
        where = f"rate {rate}, limit {limit}"
        for kind, number in point["errors"].items():
            notes.append(f"{where}: {number} x {kind}")
        notes += [f"  {message}" for message in point["error_messages"]]
        client = point["client"]
        if client["cpu_share"] > BUSY_CLIENT:
            notes.append(f"warning: {where}: the client used {client['cpu_share']:.0%} of a core")
        if client["lag_seconds"] > _LATE_SECONDS:
            late = milliseconds(client["lag_seconds"])
            notes.append(f"warning: {where}: the client sent a request {late} ms late")
    return notes


def plot(folder: Path, points: Values, title: str) -> list[Path]:
    """The four figures; returns their files."""
    written: list[Path] = []
    usable = [point for point in points if point["succeeded"]]
    for name, keys in (
        ("ttft_e2e_by_rate", ("ttft", "e2e")),
        ("tpot_itl_by_rate", ("tpot", "itl")),
    ):
        with plots.figure(folder, name, title, panels=2, written=written) as panels:
            for axes, key in zip(panels, keys, strict=True):
                place = _rate_axis(axes, usable)
                for label, group in _groups(usable, "concurrency").items():
                    _lines(axes, group, place, key, label)
                _finish(axes, "request rate (1/s)", f"{key.upper()} (ms)")
    with plots.figure(folder, "throughput_by_concurrency", title, written=written) as [axes]:
        for label, group in _groups(usable, "rate").items():
            ordered = sorted(group, key=_concurrency)
            for key, what in (("output", "output"), ("total", "prompt and output")):
                axes.plot(
                    [_concurrency(point) for point in ordered],
                    [point[f"{key}_tokens_per_second"] for point in ordered],
                    marker="o",
                    label=f"{what}{label}",
                )
        limited = any(point["concurrency"] is not None for point in usable)
        what = "limit of requests under way" if limited else "requests under way, mean"
        _finish(axes, what, "tokens per second")
    with plots.figure(folder, "ttft_by_throughput", title, written=written) as [axes]:
        _lines(axes, usable, lambda point: float(point["output_tokens_per_second"]), "ttft", "")
        _finish(axes, "output tokens per second", "TTFT (ms)")
    return written


def _groups(points: Values, by: str) -> dict[str, list[Mapping[str, Any]]]:
    """Label -> points of one line; no label when there is one line."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for point in points:
        # Without a limit, concurrency follows from the rate: then all rates are one line.
        one = by == "rate" and point["concurrency"] is None
        found.setdefault(None if one else point[by], []).append(point)
    if len(found) < 2:
        return {"": list(points)}
    names = {k: "unlimited" if k is None else k if isinstance(k, str) else f"{k:g}" for k in found}
    return {f", {by} {names[key]}": group for key, group in found.items()}


def _rate_axis(axes: Any, points: Values) -> Callable[[Mapping[str, Any]], float]:
    """A tick for each rate, and where each point stands: a burst to the right of all others."""
    rates = sorted({float(point["rate"]) for point in points if point["rate"] != "inf"})
    burst = rates[-1] * 1.25 if rates else 1.0
    ticks = {rate: f"{rate:g}" for rate in rates}
    if any(point["rate"] == "inf" for point in points):
        ticks[burst] = "burst"
    axes.set_xticks(list(ticks), list(ticks.values()))
    return lambda point: burst if point["rate"] == "inf" else float(point["rate"])


def _concurrency(point: Mapping[str, Any]) -> float:
    limit = point["concurrency"]
    return float(point["mean_in_flight"] if limit is None else limit)


def _lines(axes: Any, points: Values, x: Any, key: str, label: str) -> None:
    ordered = sorted((point for point in points if point[key]), key=x)
    for column in ("p50", "p90", "p99"):
        axes.plot(
            [x(point) for point in ordered],
            [1e3 * point[key][column] for point in ordered],
            marker="o",
            label=f"{column}{label}",
        )


def _finish(axes: Any, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
