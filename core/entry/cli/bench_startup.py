"""`octavo bench startup`: from the start of a process to its first token."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from octavo.core.entry.cli.bench_options import (
    add_output_options,
    count,
    require_plots,
    warned_if_busy,
    write_plots,
)
from octavo.core.entry.cli.options import add_engine_options, engine_arguments, engine_config

if TYPE_CHECKING:
    from octavo.core.entry.bench.startup import Start

KINDS = ("generate", "serve")


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "startup",
        help="process start to first token, part by part",
        description="Starts fresh processes and times them to their first token.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--what", type=_kinds, default=list(KINDS), metavar="KIND[,KIND]",
        help="generate, serve (both)",
    )  # fmt: skip
    bench.add_argument(
        "--repeats", type=count, default=5, metavar="N", help="fresh processes of each (5)"
    )
    bench.add_argument(
        "--warm-up", type=count, default=1, metavar="N", help="processes run before these (1)"
    )
    add_output_options(bench)
    add_engine_options(parser)


def _kinds(text: str) -> list[str]:
    found = list(dict.fromkeys(text.split(",")))
    if not set(found) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(KINDS)}, got {text!r}")
    return found


def run(options: argparse.Namespace) -> None:
    """Measures and prints."""
    require_plots(options)
    engine_config(options)  # a mistake is told here, not by a child
    from octavo.core.entry.bench import startup
    from octavo.core.entry.bench.machine import describe
    from octavo.core.entry.bench.stats import write_json

    warning = warned_if_busy()
    arguments = engine_arguments(options)
    found, model = {}, ""
    for kind in options.what:
        print(f"{kind}: {options.warm_up + options.repeats} starts …", file=sys.stderr)
        once = _generate if kind == "generate" else _serve
        starts = startup.repeated(once, arguments, options.repeats, options.warm_up)
        found[kind] = startup.values(starts)
        model = model or starts[0].model
    print(f"{model}, {options.repeats} starts\n\n{startup.table(found)}")
    if options.json is not None:
        record = {
            "format": 1,  # counts changes of the meaning
            "model": model,
            "arguments": arguments,
            "starts": found,
            "machine": describe(),
            "disturbed": warning,
        }
        write_json(options.json, record)
    write_plots(options, startup.plot, found, model)


def _generate(arguments: list[str]) -> Start:
    from octavo.core.entry.bench import startup

    return startup.start_generate(arguments)


def _serve(arguments: list[str]) -> Start:
    import asyncio

    from octavo.core.entry.bench.server_process import started
    from octavo.core.entry.bench.startup import start_server

    with started(arguments) as server:
        return asyncio.run(start_server(server))
