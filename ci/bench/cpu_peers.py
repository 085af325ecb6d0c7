"""Octavo beside other CPU engines: same machine, same run, same token ids. One table, one figure.

    python ci/bench/cpu_peers.py --work DIR

Installs each peer into an environment of its own under DIR with pip, makes the model in each one's
form, and measures engine after engine in fresh processes. What is measured is kept: the same command
goes on where it was stopped. The table is made anew at every end, also an early one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import platformdirs

from octavo.core.config import DEFAULT_MODEL, ConfigError, nearest
from octavo.core.entry.bench.machine import describe, usable_cores
from octavo.core.loading.errors import ModelError
from octavo.core.loading.sources import resolve
from octavo.core.loading.tokenizer import Tokenizer, load_tokenizer
from peers import engines, plot, table
from peers.engines import Engine, Places
from peers.environments import Environments
from peers.job import Job
from peers.models import Models
from peers.processes import PeerError
from peers.runner import Runner, Settings
from peers.store import Result, Store
from peers.works import WORKS, make_job


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when something was measured, 1 when nothing was, 2 for a mistake in what was asked."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (ConfigError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


def _leave(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C, so that the engine that runs is ended too."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(platformdirs.user_cache_dir("octavo-cpu-peers"))
    add = parser.add_argument
    add(
        "--work",
        type=Path,
        default=default,
        metavar="DIR",
        help="everything lives here (%(default)s)",
    )
    add("--output", type=Path, metavar="DIR", help="for table and figure (DIR/report of --work)")
    add(
        "--only",
        type=_names,
        default=[],
        metavar="NAME[,NAME]",
        help="engines, or families of them",
    )
    add("--work-items", type=_names, default=list(WORKS), metavar="NAME[,NAME]",
        help=f"of {','.join(WORKS)}")  # fmt: skip
    add("--octavo-variant", action="append", metavar="NAME=FLAGS",
        help="Octavo with these engine flags; may be given several times (default: "
        + " ".join(f"'{v}'" for v in engines.DEFAULT_VARIANTS) + ")")  # fmt: skip
    add("--model", default=DEFAULT_MODEL, help="a GGUF model (%(default)s)")
    add("--runs", type=int, default=3, help="of each work; the table has medians (%(default)s)")
    add("--requests", type=int, metavar="N", help="at most N requests of each work, for a trial")
    add("--timeout", type=float, default=1800.0, metavar="S", help="of one run (%(default)s)")
    add("--wait-idle", type=float, default=300.0, metavar="S",
        help="longest wait for an idle machine before each run (%(default)s)")  # fmt: skip
    add("--fresh", action="store_true", help="measure again what is known")
    add("--redo-disturbed", action="store_true", help="measure again what a busy machine disturbed")
    add("--install-only", action="store_true", help="install and convert, measure nothing")
    add("--report-only", action="store_true", help="table and figure of what is known")
    add("--list", action="store_true", help="print engines and works, and leave")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _run(options: argparse.Namespace) -> int:
    for work in options.work_items:
        if work not in WORKS:
            raise ConfigError(f"--work-items: unknown work {work!r}{nearest(work, WORKS)}")
    if options.runs < 1 or (options.requests is not None and options.requests < 1):
        raise ConfigError("--runs and --requests must be at least 1")
    variants = options.octavo_variant or engines.DEFAULT_VARIANTS
    everyone = [*map(engines.variant, variants), engines.octavo_codes(), *engines.peers()]
    chosen = engines.chosen(everyone, options.only)
    if options.list:
        print("\n".join(f"{e.name} ({e.family}): {e.about}; {', '.join(e.works)}" for e in chosen))
        print("\n".join(f"{w.name}: {w.about}, {w.unit}" for w in WORKS.values()))
        return 0
    work = options.work.expanduser().resolve()
    environments = Environments(work, may_install=not options.report_only)
    places = Places(environments, Models(work, options.model, environments), usable_cores())
    if options.install_only:
        return _install(chosen, places)
    tokenizer = load_tokenizer(resolve(options.model))
    jobs = _jobs(options, tokenizer)
    settings = Settings(
        work, options.runs, options.fresh, options.redo_disturbed, options.timeout, options.wait_idle
    )  # fmt: skip
    runner = Runner(chosen, jobs, places, Store(work / "results"), settings)
    output = options.output or work / "report"
    eos = frozenset() if tokenizer.eos_token_id is None else frozenset({tokenizer.eos_token_id})
    results: list[Result] = []
    try:
        if not options.report_only:
            runner.run()
    finally:
        results = runner.known()
        _report(output, chosen, list(jobs), results, eos, _head(options))
    return 0 if any(r.status == "ok" for r in results) else 1


def _install(chosen: Sequence[Engine], places: Places) -> int:
    failed = 0
    for engine in chosen:
        try:
            print(f"{engine.name}: {engine.prepare(places).version}", flush=True)
        except PeerError as error:
            failed += 1
            print(f"{engine.name}: {error}", flush=True)
    return 1 if failed == len(chosen) else 0


def _jobs(options: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Job]:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return {
        name: make_job(name, encode, requests=options.requests, threads=usable_cores())
        for name in options.work_items
    }


def _head(options: argparse.Namespace) -> dict[str, Any]:
    machine = describe()
    requests = "" if options.requests is None else f", at most {options.requests} requests: a trial"
    return {
        "machine": f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}",
        "model": f"{options.model}, every engine from the same float32 weights (octavo-codes: from the file)",
        "made": datetime.now(UTC).isoformat(timespec="minutes"),
        "runs": f"{options.runs}{requests}",
    }


def _report(
    output: Path,
    chosen: Sequence[Engine],
    works: Sequence[str],
    results: Sequence[Result],
    eos: frozenset[int],
    head: dict[str, Any],
) -> None:
    rows = table.make_rows(chosen, works, results, eos)
    text = table.markdown(rows, works, head)
    output.mkdir(parents=True, exist_ok=True)
    (output / "cpu_peers.md").write_text(text, "utf-8")
    everything = {
        "head": head,
        "machine": describe(),
        "rows": [dataclasses.asdict(row) for row in rows],
        "ratios": table.ratios(rows),
        "results": [dataclasses.asdict(dataclasses.replace(r, tokens=[])) for r in results],
    }
    (output / "cpu_peers.json").write_text(json.dumps(everything, indent=1), "utf-8")
    drawn = plot.draw(output / "cpu_peers", rows, works, f"{head['model']}\n{head['machine']}")
    print(text)
    for path in [output / "cpu_peers.md", output / "cpu_peers.json", *drawn]:
        print(f"written: {path}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main())
