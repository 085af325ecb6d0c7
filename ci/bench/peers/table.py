"""Results as one table: medians, what went wrong, and how many times faster Octavo is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from peers.engines import BASELINE, Engine
from peers.store import Result
from peers.works import WORKS, Work

_REASON_LENGTH = 90
_TOKENS_WORK = "sharegpt"
RSS = "peak RSS"


@dataclass(frozen=True)
class Cell:
    """One engine on one work. `value` is the median over `runs` that succeeded; None: none did."""

    value: float | None = None
    runs: list[float] = field(default_factory=list)
    failed: str = ""
    disturbed: bool = False


@dataclass(frozen=True)
class Row:
    """One engine. same_tokens: requests whose float32 reference tokens it gave, of how many."""

    engine: str
    version: str
    about: str
    is_octavo: bool
    cells: dict[str, Cell]
    first_start: float | None
    peak_rss_mb: float | None
    same_tokens: tuple[int, int] | None
    batched: list[dict[str, float]]

    @property
    def failure(self) -> str:
        """The reason when nothing of it could be measured."""
        if any(cell.value is not None for cell in self.cells.values()) or self.batched:
            return ""
        return next((cell.failed for cell in self.cells.values() if cell.failed), "")


def make_rows(
    engines: Sequence[Engine],
    works: Sequence[str],
    results: Sequence[Result],
    eos: frozenset[int] = frozenset(),
) -> list[Row]:
    """A row for each engine that has results.

    Args:
        eos: tokens that end a text. Engines differ in what comes after one where it is to be
            ignored (some never choose it), so tokens are compared up to there.
    """
    reference = next((r.tokens for r in _good(results, BASELINE, _TOKENS_WORK) if r.run == 1), None)
    rows = []
    for engine in engines:
        own = [r for r in results if r.engine == engine.name]
        if not own:
            continue
        cells = {
            work: _cell(WORKS[work], [r for r in own if r.work == work])
            for work in works
            if any(r.work == work for r in own) and WORKS[work].metric != "batched"
        }
        batched = [r for r in own if r.work == "batched"]
        if batched and not any(r.status == "ok" for r in batched):
            cells["batched"] = Cell(failed=_failure(batched))
        rows.append(
            Row(
                engine.name,
                own[0].version,
                engine.about,
                engine.family == "octavo",
                cells,
                next((r.values["start"] for r in own if r.run == 0 and r.status == "ok"), None),
                _peak(own),
                _same(own, reference, eos),
                _batched(batched),
            )
        )
    return rows


def _good(results: Sequence[Result], engine: str, work: str) -> list[Result]:
    return [r for r in results if (r.engine, r.work, r.status) == (engine, work, "ok")]


def _cell(work: Work, results: Sequence[Result]) -> Cell:
    good = [r for r in results if r.status == "ok" and r.run > 0]
    runs = [r.values[work.metric] for r in good]
    return Cell(
        median(runs) if runs else None,
        runs,
        _failure(results),
        any(r.disturbed for r in good),
    )


def _failure(results: Sequence[Result]) -> str:
    return next((f"{r.status}: {r.reason}" for r in results if r.status != "ok"), "")


def _peak(results: Sequence[Result]) -> float | None:
    """MB, the median over the runs of the largest work."""
    for work in WORKS:
        peaks = [r.peak_rss_bytes / 1e6 for r in results if r.work == work and r.peak_rss_bytes]
        if peaks:
            return median(peaks)
    return None


def _batched(results: Sequence[Result]) -> list[dict[str, float]]:
    runs = [r.batched for r in results if r.status == "ok" and r.run > 0]
    return [
        {name: median(row[name] for row in rows) for name in rows[0]}
        for rows in zip(*runs, strict=True)
    ]


def _same(
    results: Sequence[Result], reference: list[list[int]] | None, eos: frozenset[int]
) -> tuple[int, int] | None:
    run = next((r for r in results if r.work == _TOKENS_WORK and r.status == "ok"), None)
    if run is None or reference is None:
        return None
    pairs = list(zip(run.tokens, reference, strict=False))
    equal = 0
    for ours, theirs in pairs:
        end = next((i for i, token in enumerate(theirs) if token in eos), len(theirs))
        equal += ours[:end] == theirs[:end]
    return equal, len(pairs)


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Octavo variant -> other engine -> column -> how many times better Octavo is.

    Above 1 Octavo is faster, sooner ready, or needs less memory. Only what both were measured on.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for ours in rows:
        if not ours.is_octavo:
            continue
        for theirs in rows:
            if theirs.engine != ours.engine and (columns := _ratio(ours, theirs)):
                found.setdefault(ours.engine, {})[theirs.engine] = columns
    return found


def _ratio(ours: Row, theirs: Row) -> dict[str, float]:
    found = {}
    for work, cell in ours.cells.items():
        other = theirs.cells.get(work)
        if cell.value and other is not None and other.value:
            lower = WORKS[work].lower_is_better
            found[work] = other.value / cell.value if lower else cell.value / other.value
    if found and ours.peak_rss_mb and theirs.peak_rss_mb:
        found[RSS] = theirs.peak_rss_mb / ours.peak_rss_mb
    return found


def markdown(rows: Sequence[Row], works: Sequence[str], head: Mapping[str, Any]) -> str:
    """The tables as text: figures, the engines' own tool, ratios, failures, notes."""
    shown = [WORKS[work] for work in works if WORKS[work].metric != "batched"]
    parts = [
        "# Octavo and other engines on the same CPU",
        "\n".join(f"- {name}: {value}" for name, value in head.items()),
        _figures(rows, shown),
    ]
    if any(row.batched for row in rows):
        parts += [
            "## llama-batched-bench",
            WORKS["batched"].about + ", tokens per second.",
            _tool(rows),
        ]
    for variant, others in ratios(rows).items():
        parts += [
            f"## {variant}: times better than",
            _grid(
                ["engine", *(w.name for w in shown), RSS],
                [
                    [name, *(_times(columns.get(c)) for c in [*(w.name for w in shown), RSS])]
                    for name, columns in others.items()
                ],
            ),
        ]
    if failures := _failures(rows):
        parts += ["## What failed", "\n".join(failures)]
    parts += ["## Engines", "\n".join(f"- {r.engine} {r.version}: {r.about}" for r in rows)]
    return "\n\n".join(parts) + "\n"


def _failures(rows: Sequence[Row]) -> list[str]:
    """A line for each engine and reason, with the works that it stopped."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for work, cell in row.cells.items():
            if cell.failed:
                found.setdefault((row.engine, cell.failed), []).append(work)
    return [f"- {engine}, {', '.join(w)}: {reason}" for (engine, reason), w in found.items()]


def _figures(rows: Sequence[Row], shown: Sequence[Work]) -> str:
    head = ["engine", *(f"{w.name}, {w.unit}" for w in shown), "first start, s"]
    head += [f"{RSS}, MB", "same tokens"]
    lines = []
    for row in rows:
        if row.failure:
            blanks = [""] * (len(head) - 2)
            lines.append([row.engine, _cut(row.failure), *blanks])
            continue
        same = "" if row.same_tokens is None else "{} of {}".format(*row.same_tokens)
        lines.append(
            [
                row.engine,
                *(_shown(row.cells.get(w.name)) for w in shown),
                _number(row.first_start),
                _number(row.peak_rss_mb),
                same,
            ]
        )
    notes = [f"- {w.name}: {w.about}." for w in shown]
    notes.append(
        "- Medians of the runs. †: other processes took part of the machine in one of them at least."
    )
    notes.append(
        f"- same tokens: requests of {_TOKENS_WORK} with the greedy tokens of {BASELINE}, up to "
        "the first end-of-text token."
    )
    return _grid(head, lines) + "\n\n" + "\n".join(notes)


def _tool(rows: Sequence[Row]) -> str:
    lines = [
        [row.engine, f"{b['width']:.0f}", _number(b["prefill"]), _number(b["decode"])]
        for row in rows
        for b in row.batched
    ]
    return _grid(["engine", "batch", "prefill", "decode"], lines)


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    if cell.value is None:
        return cell.failed.partition(":")[0] or "–"
    return _number(cell.value) + (" †" if cell.disturbed else "")


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _cut(text: str) -> str:
    flat = " ".join(text.split()).replace("|", "/")
    return flat if len(flat) <= _REASON_LENGTH else flat[: _REASON_LENGTH - 1] + "…"


def _grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])
