"""`octavo bench latency`: one request at a time."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.core.entry.cli.bench_options import (
    add_output_options,
    count,
    counts,
    prepared,
    watched,
    write_plots,
)
from octavo.core.entry.cli.options import add_engine_options


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "latency",
        help="one request at a time: TTFT, TPOT, E2E",
        description="Runs one request after the other in this process, greedy and with fixed "
        "lengths, and tells how long each part took.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--input-len", type=counts, default=[128], metavar="N[,N]", help="prompt tokens (128)"
    )
    bench.add_argument(
        "--output-len", type=counts, default=[128], metavar="N[,N]", help="output tokens (128)"
    )
    bench.add_argument(
        "--repeats", type=count, default=10, metavar="N", help="requests of each combination (10)"
    )
    bench.add_argument(
        "--warm-up", type=count, default=2, metavar="N", help="requests run before these (2)"
    )
    add_output_options(bench)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Measures and prints."""
    config = prepared(options)
    from octavo.core.entry.bench import latency
    from octavo.core.entry.llm import LLM

    with watched(options, config) as record, LLM.from_config(config) as llm:
        tokenizer, info = llm.get_tokenizer(), llm.info
        results = latency.measure(
            llm,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            options.input_len,
            options.output_len,
            options.repeats,
            options.warm_up,
        )
        found = latency.values(results)
        record({"cases": found, "formulas": latency.FORMULAS, "warm_up": options.warm_up}, info)
    name = f"{info.name} ({info.device}, {info.numbers})"
    print(f"{name}, {options.repeats} requests one by one\n\n{latency.table(found)}")
    write_plots(options, latency.plot, results, name)
