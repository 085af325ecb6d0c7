"""`octavo bench scaling`: decode steps by number of sequences and by context."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.core.entry.cli.bench_options import (
    add_output_options,
    add_table_options,
    count,
    counts,
    measuring,
    prepared,
    watched,
    write_plots,
)
from octavo.core.entry.cli.options import add_engine_options


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "scaling",
        help="tokens per second by number of sequences, a step's time by context",
        description="Runs decode steps of more and more sequences, and of one longer and longer sequence.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--batch", type=counts, default=[1, 2, 4, 8, 16, 32, 64, 128, 256], metavar="N[,N]",
        help="sequences in a step (1,2,4,…,256)",
    )  # fmt: skip
    bench.add_argument(
        "--batch-context", type=count, default=64, metavar="N", help="tokens of each of them (64)"
    )
    bench.add_argument(
        "--context", type=counts, default=[128, 256, 512, 1024, 2048, 4096, 8192], metavar="N[,N]",
        help="tokens of the one sequence (128,256,…,8192); what the model cannot hold is left out",
    )  # fmt: skip
    bench.add_argument(
        "--repeats", type=count, default=9, metavar="N", help="steps of each kind (9)"
    )
    add_table_options(bench)
    add_output_options(bench)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Measures and prints."""
    config = prepared(options)
    from octavo.core.entry.bench import scaling
    from octavo.core.entry.front import load_progress
    from octavo.core.entry.wiring import resolve_model

    files = resolve_model(config, load_progress(config))
    with watched(options, config) as record:
        found = scaling.measure(
            config,
            files,
            batches=options.batch,
            batch_context=options.batch_context,
            contexts=options.context,
            repeats=options.repeats,
            progress=measuring,
        )
        record(scaling.record(found), found.info)
    print(scaling.table(found, as_markdown=options.markdown))
    write_plots(options, scaling.plot, found)
