"""A scorecard for people: in a terminal, and as a page of HTML that needs nothing beside it."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.plugins.conformance.scorecard import EXECUTIONS, Row, Scorecard, remark_of

if TYPE_CHECKING:
    from rich.console import Console

GROUPS = {"contract": "The contract", "op": "Operations", "engine": "Through the engine"}
_COLOURS = {"passed": "green", "failed": "bold red", "refused": "yellow", "compiled": "yellow"}


def number(value: float | None) -> str:
    """Two digits, or nothing."""
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def cells(row: Row) -> tuple[str, ...]:
    """A row's columns: those of `HEAD`."""
    cases = f"{row.cases - row.failures}/{row.cases}" if row.failures else str(row.cases or "")
    return (
        row.op,
        row.dtype,
        row.state,
        cases,
        number(row.error),
        number(row.tolerance),
        "" if row.speed is None else f"{row.speed:.2f}x",
        row.speed_at,
        row.execution if row.group != "contract" else "",
        row.runs,
    )


HEAD = (
    *("", "dtype", "state", "cases", "worst error", "tolerance"),
    *("speed", "measured at", "executed", "by"),
)


def verdict(card: Scorecard) -> str:
    """One line."""
    parts = [f"{card.count('passed')} passed", f"{card.count('failed')} failed"]
    for state in ("not offered", "refused", "compiled"):
        if card.count(state):
            parts.append(f"{card.count(state)} {state}")
    remark = remark_of(card.capabilities.get("notes", {}))
    return (
        f"{card.backend} on {card.device}: {', '.join(parts)} in {card.seconds:.0f} s; "
        f"{EXECUTIONS[card.execution]}{f' ({remark})' if remark else ''}"
    )


def show(card: Scorecard, console: Console) -> None:
    """Prints tables, then each failure with the command that repeats it."""
    from rich.table import Table
    from rich.text import Text

    for group, title in GROUPS.items():
        rows = [row for row in card.rows if row.group == group]
        if not rows:
            continue
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in HEAD:
            table.add_column(name, no_wrap=name in ("", "dtype", "state"))
        for row in rows:
            first, dtype, state, *rest = cells(row)
            table.add_row(first, dtype, Text(state, _COLOURS.get(state, "dim")), *rest)
        console.print(table)
        console.print()
    for row in card.failed:
        console.print(Text(f"{row.failing}: {row.detail}", "red"))
        console.print(f"  alone: {row.command}", markup=False, highlight=False, soft_wrap=True)
    console.print(Text(verdict(card), "bold"))


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color: #1b1f24; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #d8dee4; vertical-align: top }
td:nth-child(n+4):nth-child(-n+7) { text-align: right; font-variant-numeric: tabular-nums }
.passed { color: #1a7f37 } .failed { color: #cf222e; font-weight: 600 }
.refused, .compiled { color: #9a6700 } code { font-size: 13px }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117 }
  th, td { border-color: #30363d } .passed { color: #3fb950 } .failed { color: #f85149 } }
"""


def page(card: Scorecard) -> str:
    """The scorecard as HTML."""
    name = html.escape(f"{card.backend} on {card.device}")
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{name}: conformance</title><style>{_STYLE}</style>",
        f"<h1>{name}</h1><p>{html.escape(verdict(card))}. Octavo {html.escape(card.version)}, contract "
        f"{card.contract[0]}.{card.contract[1]}, {'full' if card.full else 'default'} check.</p>",
    ]
    for group, title in GROUPS.items():
        rows = [row for row in card.rows if row.group == group]
        if rows:
            parts += [f"<h2>{title}</h2>", *_table(rows)]
    if card.failed:
        parts.append("<h2>Failures</h2>")
        for row in card.failed:
            parts.append(
                f"<p class=failed>{html.escape(row.failing or '')}: {html.escape(row.detail)}</p>"
                f"<p><code>{html.escape(row.command or '')}</code></p>"
            )
    return "\n".join([*parts, "</html>"]) + "\n"


def _table(rows: Iterable[Row]) -> Iterable[str]:
    yield "<table><tr>" + "".join(f"<th>{h}</th>" for h in HEAD) + "</tr>"
    for row in rows:
        values = cells(row)
        state = f'<td class="{values[2].replace(" ", "-")}">{values[2]}</td>'
        rest = "".join(f"<td>{html.escape(v)}</td>" for v in values[3:])
        yield f"<tr><td>{html.escape(values[0])}</td><td>{html.escape(values[1])}</td>{state}{rest}</tr>"
    yield "</table>"


def write_page(card: Scorecard, path: Path) -> None:
    """Writes the HTML."""
    path.write_text(page(card), "utf-8")
