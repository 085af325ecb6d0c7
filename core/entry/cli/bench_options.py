"""Options that the benchmarks share."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.core.config import EngineConfig, prepare_thread_environment
from octavo.core.entry.cli.options import engine_config


def count(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def counts(text: str) -> list[int]:
    """One `count` or several, separated by commas."""
    return [count(part) for part in text.split(",")]


def add_output_options(group: Any) -> None:
    """Where a measurement goes beside standard output."""
    group.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")
    group.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="write figures here, as PNG and SVG (needs octavo[bench])",
    )


def add_table_options(group: Any) -> None:
    """How a measurement is printed."""
    group.add_argument("--markdown", action="store_true", help="print Markdown tables")


def add_record_options(group: Any) -> None:
    """How a measurement is printed, and where else it goes; it has no figure."""
    add_table_options(group)
    group.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")


def require_plots(options: argparse.Namespace) -> None:
    """Raises ConfigError where --plot is asked for and cannot be served: before anything is measured."""
    if options.plot is not None:
        from octavo.core.entry.bench import plots

        plots.require()


def write_plots(
    options: argparse.Namespace, plot: Callable[..., Iterable[Path]], *args: Any
) -> None:
    """Draws plot(folder, *args) where --plot names a folder, and tells which files that made."""
    if options.plot is not None:
        for path in plot(options.plot, *args):
            print(f"wrote {path}", file=sys.stderr)


def prepared(options: argparse.Namespace) -> EngineConfig:
    """The engine's configuration. Called before torch is imported: its threads are set up by it."""
    if "plot" in options:
        require_plots(options)
    prepare_thread_environment()
    return engine_config(options)


def measuring(what: str) -> None:
    """Says on standard error what is measured next."""
    print(f"measuring {what} …", file=sys.stderr)


def warned_if_busy() -> str | None:
    """The warning, printed on standard error, that this machine is not idle."""
    from octavo.core.entry.bench.machine import idle_warning

    warning = idle_warning()
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    return warning


@contextmanager
def watched(
    options: argparse.Namespace, config: EngineConfig
) -> Iterator[Callable[[dict[str, Any], Any], None]]:
    """Warns on standard error where the machine is not left alone before or meanwhile.

    Yields a function that takes what was measured and the engine's info (or None); at the end that is
    written to --json, with the machine and the configuration.
    """
    import msgspec

    from octavo.core.entry.bench.machine import LoadMeter, describe
    from octavo.core.entry.bench.stats import write_json

    warning = warned_if_busy()
    found: dict[str, Any] = {"format": 1}  # counts changes of the meaning

    def record(values: dict[str, Any], info: Any) -> None:
        found.update(values, engine=msgspec.to_builtins(info))

    meter = LoadMeter()
    yield record
    load = meter.read()
    if load is not None and load.disturbed:
        warning = f"meanwhile {load}"
        print(f"warning: {warning}", file=sys.stderr)
    if options.json is not None:
        found.update(machine=describe(), config=dataclasses.asdict(config), disturbed=warning)
        write_json(options.json, found)
