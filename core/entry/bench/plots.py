"""Figures as PNG and SVG. matplotlib is an optional extra: only a plot that is asked for needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.core.config import ConfigError
from octavo.core.entry.cli.failure import CommandFailed

COLORS = {
    "used": "#2a6f97",
    "reserved": "#a9d6e5",
    "internal": "#f4a259",
    "external": "#bc4b51",
    "free": "#e5e5e5",
}


def require() -> None:
    """Called before anything is measured, so that no run is lost to a missing library.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib ({error}): pip install 'octavo[bench]'"
        ) from error


@contextmanager
def figure(
    folder: Path, name: str, title: str, *, panels: int = 1, written: list[Path]
) -> Iterator[list[Any]]:
    """Axes to draw on; afterwards they are in `folder` as `name`.png and `name`.svg.

    Args:
        panels: axes side by side.
        written: takes the files' paths.

    Raises:
        CommandFailed: the files cannot be written.
    """
    require()
    # The object interface: pyplot would look for a display and keep figures alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6.4 * panels, 4.4), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = list(drawing.subplots(1, panels, squeeze=False)[0])
    yield axes
    drawing.suptitle(title, fontsize="medium")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            # No date in the file: the same figures give the same bytes.
            metadata = {"Date": None} if kind == "svg" else None
            drawing.savefig(path, dpi=150, metadata=metadata)
            written.append(path)
    except OSError as error:
        raise CommandFailed(f"plots cannot be written to {folder}: {error}") from error


def colors(count: int) -> list[Any]:
    """So many colours, all different up to twenty."""
    import matplotlib

    table = matplotlib.colormaps["tab20"]
    return [table(i % table.N) for i in range(count)]
