"""`octavo bench sharing`: KV blocks that parallel samples and beams save."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from octavo.core.entry.cli.bench_options import (
    add_output_options,
    add_table_options,
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
        "sharing",
        help="share of the KV blocks that parallel samples and beams save",
        description="Replays parallel samples through the engine's scheduler without the model, runs beam "
        "search with it, and counts the blocks that are shared.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--width", type=counts, default=[2, 4, 6], metavar="N[,N]",
        help="samples or beams of a request (2,4,6)",
    )  # fmt: skip
    bench.add_argument(
        "--trace",
        default="alpaca,sharegpt",
        metavar="NAME[,NAME]",
        help="alpaca, sharegpt (both): log-normal lengths with the data sets' means",
    )
    bench.add_argument(
        "--sampled-requests", type=count, default=500, metavar="N",
        help="requests of several samples (500)",
    )  # fmt: skip
    bench.add_argument(
        "--slots", type=count, default=15_728, metavar="N",
        help="tokens that the pool of the samples holds (15728)",
    )  # fmt: skip
    bench.add_argument(
        "--requests", type=count, default=8, metavar="N", help="requests of several beams (8)"
    )
    bench.add_argument(
        "--max-output", type=count, default=256, metavar="N",
        help="output tokens of a beam search at most (256)",
    )  # fmt: skip
    add_table_options(bench)
    add_output_options(bench)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Measures and prints."""
    config = prepared(options)
    from octavo.core.entry.bench import sharing
    from octavo.core.entry.bench.kv_waste import make_trace
    from octavo.core.entry.llm import LLM

    names = list(dict.fromkeys(options.trace.split(",")))

    def progress(kind: str) -> Any:
        return lambda what: print(f"{kind}: {what} …", file=sys.stderr)

    with watched(options, config) as record, LLM.from_config(config) as llm:
        info, encode = llm.info, llm.get_tokenizer().encode
        limit = info.max_model_len

        def traces(requests: int, longest: int) -> dict[str, Any]:
            return {name: make_trace(name, longest, requests) for name in names}

        found = sharing.measure(
            traces(options.sampled_requests, 2048),
            options.width,
            lambda name, trace, width: sharing.replay_samples(
                name, trace, width, options.slots, info.block_size
            ),
            progress("samples"),
        )
        found += sharing.measure(
            {
                name: sharing.capped(trace, options.max_output)
                for name, trace in traces(options.requests, min(limit, 2048)).items()
            },
            options.width,
            lambda name, trace, width: sharing.run_beams(
                llm._engine, lambda text: encode(text, add_special_tokens=False), name, trace, width
            ),
            progress("beams"),
        )
        record(sharing.record(found), info)
    name = f"{info.name} ({info.device}, {info.numbers}), blocks of {info.block_size}"
    print(f"{name}\n\n{sharing.table(found, as_markdown=options.markdown)}")
    write_plots(options, sharing.plot, found, name)
