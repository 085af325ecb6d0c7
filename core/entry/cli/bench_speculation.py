"""`octavo bench speculation`: with and without drafts, by task and load."""

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
        "speculation",
        help="what drafts bring: acceptance, speed-up by load, where it ends",
        description="Runs copying tasks and free text without drafts, with them and without again, turn by turn in one "
        'engine, with --speculative-config or else {"method": "ngram"}.',
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--streams", type=counts, default=[1, 2, 4, 8, 16, 32], metavar="N[,N]",
        help="requests at once (1,2,4,8,16,32)",
    )  # fmt: skip
    bench.add_argument(
        "--output-len", type=count, default=96, metavar="N", help="output tokens of each (96)"
    )
    bench.add_argument(
        "--repeats", type=count, default=3, metavar="N", help="rounds that are counted (3)"
    )
    add_table_options(bench)
    add_output_options(bench)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Measures and prints."""
    config = prepared(options)
    if config.speculative_config is None:
        config = config.with_values(speculative_config={"method": "ngram"})
    from octavo.core.entry.bench import speculation
    from octavo.core.entry.llm import LLM

    with watched(options, config) as record, LLM.from_config(config) as llm:
        found = speculation.measure(
            llm,
            options.streams,
            options.output_len,
            options.repeats,
            progress=measuring,
        )
        name = f"{llm.info.name} ({llm.info.device}, {llm.info.numbers})"
        record(speculation.record(found), llm.info)
    print(f"{name}\n\n{speculation.table(found, as_markdown=options.markdown)}")
    write_plots(options, speculation.plot, found, name)
