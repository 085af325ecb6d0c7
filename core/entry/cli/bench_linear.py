"""`octavo bench linear`: the ways there are to multiply by a model's weights."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.core.config import ConfigError
from octavo.core.entry.cli.bench_options import (
    add_record_options,
    count,
    counts,
    measuring,
    prepared,
    watched,
)
from octavo.core.entry.cli.options import add_engine_options


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "linear",
        help="the device's own products beside other libraries', for the model's shapes",
        description="Multiplies by weights of the model's shapes (random ones: none is read) with the "
        "device's own kernels and with every other way that works here.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--rows", type=counts, default=[1, 8, 32, 64, 512], metavar="N[,N]",
        help="rows of activations (1,8,32,64,512)",
    )  # fmt: skip
    bench.add_argument(
        "--formats",
        type=lambda text: text.split(","),
        metavar="NAME[,NAME]",
        help="how weights are kept: float32, float16, bfloat16, int8, int4 (all)",
    )
    bench.add_argument(
        "--isa", metavar="NAME", help="instruction set of the device's own kernels (the best)"
    )
    bench.add_argument("--passes", type=count, default=7, metavar="N", help="of each path (7)")
    add_record_options(bench)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Measures and prints.

    Raises:
        CommandFailed: a path gives wrong results.
    """
    config = prepared(options)
    from octavo.core.entry.bench import linear, roofline
    from octavo.core.entry.cli.failure import CommandFailed
    from octavo.core.entry.front import load_progress
    from octavo.core.entry.wiring import resolve_model

    files = resolve_model(config, load_progress(config), weights=False)
    instruments = roofline.instruments_of(config)
    specs, made = roofline.described(config, files)
    made.resolved.backend.start(made.resolved.device, made.limits)
    best, *_ = instruments.variants()
    try:
        try:
            instruments.use_variant(options.isa or best)
        except ValueError as error:
            raise ConfigError(f"--isa {options.isa}: {error}") from error
        paths, refused = instruments.linear_paths()
        with watched(options, config) as record:
            cases = linear.measure(
                linear.shapes_of(specs),
                linear.chosen(paths, options.formats),
                options.rows,
                options.passes,
                measuring,
            )
            record({"isa": options.isa or best, **linear.record(cases, refused)}, None)
    except linear.WrongResult as error:
        raise CommandFailed(str(error)) from error
    finally:
        instruments.use_variant(best)
    print(f"{files.name} on {made.resolved.device}, octavo {options.isa or best}\n")
    print(linear.table(cases, as_markdown=options.markdown))
    for name, reason in refused.items():
        print(f"not measured: {name}: {reason}")
