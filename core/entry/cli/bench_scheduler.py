"""`octavo bench scheduler`: what planning a step costs, by how many run and how many wait."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.core.config import ConfigError, nearest
from octavo.core.entry.cli.bench_options import count, counts, warned_if_busy


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "scheduler",
        help="microseconds that planning a step takes, by requests running and waiting",
        description="Runs the engine's own scheduler and batch builder, without a model, and times "
        "their parts of each step.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--case",
        default="decode,memory,turnover",
        metavar="NAME[,NAME]",
        help="decode, memory, turnover (all)",
    )
    bench.add_argument(
        "--running", type=counts, default=[64], metavar="N[,N]", help="sequences running (64)"
    )
    bench.add_argument(
        "--waiting",
        type=counts,
        default=[10, 100, 1000, 10_000],
        metavar="N[,N]",
        help="requests waiting (10,100,1000,10000)",
    )
    bench.add_argument("--steps", type=count, default=300, metavar="N", help="steps timed (300)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")


def run(options: argparse.Namespace) -> None:
    """Measures and prints.

    Raises:
        ConfigError: an unknown case.
    """
    from octavo.core.entry.bench import scheduling
    from octavo.core.entry.bench.stats import write_json

    cases = list(dict.fromkeys(options.case.split(",")))
    for name in cases:
        if name not in scheduling.CASES:
            raise ConfigError(
                f"unknown case {name!r}{nearest(name, scheduling.CASES)}; "
                f"there are {', '.join(scheduling.CASES)}"
            )
    warning = warned_if_busy()
    found = scheduling.measure(cases, options.running, options.waiting, options.steps)
    print(scheduling.table(found))
    if options.json is not None:
        write_json(options.json, scheduling.record(found, options.steps, warning))
