"""`octavo backend check NAME`: does a backend keep the contract, on this machine. `octavo backend new NAME`
stands in `backend_new.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.config import ConfigError, prepare_thread_environment, wants_color
from octavo.core.entry.cli import backend_new

if TYPE_CHECKING:
    from octavo.plugins.conformance.scorecard import Result, Scorecard


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    check = actions.add_parser(
        "check", help="every operation, the contract, and tiny models through the engine"
    )
    check.add_argument("NAME", help="a backend, or a device word, as `octavo devices` lists them")
    check.add_argument("--device", metavar="WORD", help="which of its devices, as reference:cuda")
    check.add_argument(
        "--full", action="store_true", help="more cases of each kind; takes its time"
    )
    check.add_argument(
        "--only",
        metavar="PATTERN",
        help="checks whose id has this in it, or matches it with * and ?",
    )
    check.add_argument("--json", metavar="FILE", type=Path, help="write the scorecard as JSON")
    check.add_argument("--html", metavar="FILE", type=Path, help="write the scorecard as a page")
    backend_new.add_arguments(actions)
    check.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    """Runs the conformance kit; ends with exit code 1 when a check fails."""
    if options.action == "new":
        backend_new.run(options)
        return
    prepare_thread_environment()
    for path in (options.json, options.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.absolute().parent}")
    from octavo.plugins.conformance.run import check, resolve

    resolved = resolve(options.NAME, options.device)
    word = options.NAME + (f" --device {options.device}" if options.device else "")
    with _Progress() as progress:
        card = check(
            resolved.backend,
            resolved.device,
            full=options.full,
            only=options.only,
            word=word,
            tell=progress.tell,
        )
    _show(card)
    if options.json is not None:
        card.write(options.json)
    if options.html is not None:
        from octavo.plugins.conformance.report import write_page

        write_page(card, options.html)
    if not card.passed:
        sys.exit(1)


def _show(card: Scorecard) -> None:
    from rich.console import Console

    from octavo.plugins.conformance.report import show

    wide = None if sys.stdout.isatty() else 160
    show(card, Console(no_color=not wants_color(), width=wide, highlight=False))


class _Progress:
    """A bar on a terminal's standard error; failures as they come."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True, no_color=not wants_color())
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tell(self, result: Result, total: int) -> None:
        """One more result of `total`."""
        self._bar.update(self._task, advance=1, total=total, description=result.id)
