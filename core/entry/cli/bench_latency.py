"""`octavo bench latency`: one request at a time."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from octavo.core.config import prepare_thread_environment
from octavo.core.entry.cli.bench_options import add_output_options, count, counts
from octavo.core.entry.cli.options import add_engine_options, engine_config


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
    if options.plot is not None:
        from octavo.core.entry.bench import plots

        plots.require()
    prepare_thread_environment()
    config = engine_config(options)
    import msgspec

    from octavo.core.entry.bench import latency
    from octavo.core.entry.bench.machine import LoadMeter, describe, idle_warning
    from octavo.core.entry.bench.stats import write_json
    from octavo.core.entry.llm import LLM

    warning = idle_warning()
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    with LLM.from_config(config) as llm:
        tokenizer, info = llm.get_tokenizer(), llm.info
        meter = LoadMeter()
        results = latency.measure(
            llm,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            options.input_len,
            options.output_len,
            options.repeats,
            options.warm_up,
        )
        load = meter.read()
    if load is not None and load.disturbed:
        warning = f"meanwhile {load}"
        print(f"warning: {warning}", file=sys.stderr)
    found = latency.values(results)
    name = f"{info.name} ({info.device}, {info.numbers})"
    print(f"{name}, {options.repeats} requests one by one\n\n{latency.table(found)}")
    if options.json is not None:
        record = {
            "format": 1,  # counts changes of the meaning
            "cases": found,
            "formulas": latency.FORMULAS,
            "warm_up": options.warm_up,
            "machine": describe(),
            "config": dataclasses.asdict(config),
            "engine": msgspec.to_builtins(info),
            "disturbed": warning,
        }
        write_json(options.json, record)
    if options.plot is not None:
        for path in latency.plot(options.plot, results, name):
            print(f"wrote {path}", file=sys.stderr)
