"""`octavo bench roofline`: a step's time beside the least that the machine allows."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.core.entry.cli.bench_options import add_record_options, count, counts, prepared, watched
from octavo.core.entry.cli.options import add_engine_options


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "roofline",
        help="a step's phases beside what the machine allows: floor, measured, gap",
        description="Measures what the machine can do at most (arithmetic, reading memory), counts what a "
        "step needs, runs such steps through the engine, and sets each phase beside its floor.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--prefill", type=count, default=512, metavar="N", help="prompt tokens of a step (512)"
    )
    bench.add_argument(
        "--batch", type=counts, default=[1, 8, 32, 64], metavar="N[,N]",
        help="sequences in a decode step (1,8,32,64)",
    )  # fmt: skip
    bench.add_argument(
        "--context", type=count, default=256, metavar="N",
        help="tokens of each sequence in a decode step (256)",
    )  # fmt: skip
    bench.add_argument(
        "--repeats", type=count, default=15, metavar="N", help="steps of each kind (15)"
    )
    add_record_options(bench)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Measures and prints."""
    config = prepared(options)
    from octavo.core.entry.bench import roofline
    from octavo.core.entry.front import load_progress
    from octavo.core.entry.wiring import resolve_model

    files = resolve_model(config, load_progress(config))
    with watched(options, config) as record:
        found = roofline.measure(
            config,
            files,
            prefill=options.prefill,
            batches=options.batch,
            context=options.context,
            repeats=options.repeats,
        )
        record(roofline.record(found), found.info)
    print(roofline.table(found, as_markdown=options.markdown))
