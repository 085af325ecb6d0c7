"""The table as a figure: one panel for each work, one bar for each engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peers.table import Row
from peers.works import WORKS

_OCTAVO, _OTHERS = "#bc4b51", "#2a6f97"
_COLUMNS = 4


def draw(path: Path, rows: Sequence[Row], works: Sequence[str], title: str) -> list[Path]:
    """Writes `path`.png and `path`.svg; nothing when no work was measured.

    Args:
        path: without an ending.
    """
    # The object interface: pyplot would look for a display and keep figures alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [w for w in works if any(_value(row, w) is not None for row in rows)]
    if not shown:
        return []
    columns = min(_COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    height = 1.0 + 0.28 * max(len(rows), 4)
    figure = Figure(figsize=(4.6 * columns, height * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, work in zip(axes, shown, strict=False):
        pairs = [(row, value) for row in rows if (value := _value(row, work)) is not None]
        colors = [_OCTAVO if row.is_octavo else _OTHERS for row, _ in pairs]
        bars = panel.barh([row.engine for row, _ in pairs], [v for _, v in pairs], color=colors)
        panel.bar_label(bars, fmt="{:,.4g}", padding=2, fontsize="x-small")
        panel.margins(x=0.18)
        panel.invert_yaxis()
        panel.tick_params(labelsize="x-small")
        better = "less is better" if WORKS[work].lower_is_better else "more is better"
        panel.set_title(f"{work}: {WORKS[work].unit}, {better}", fontsize="small")
    for panel in axes[len(shown) :]:
        panel.remove()
    figure.suptitle(title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(ending) for ending in (".png", ".svg")]
    for file in written:
        figure.savefig(file, dpi=130)
    return written


def _value(row: Row, work: str) -> float | None:
    cell = row.cells.get(work)
    return None if cell is None else cell.value
