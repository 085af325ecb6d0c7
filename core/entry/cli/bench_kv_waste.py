"""`octavo bench kv-waste`: how much of a KV cache holds tokens, paged and in one piece."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.core.entry.cli.bench_options import (
    add_output_options,
    count,
    require_plots,
    write_plots,
)


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "kv-waste",
        help="share of the KV cache that holds tokens, against contiguous reservations",
        description="Replays a trace of request lengths, without a model, through the engine's own "
        "scheduler and paged KV cache and through simulators that reserve contiguous chunks.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--trace",
        default="sharegpt,alpaca",
        metavar="NAME[,NAME]",
        help="sharegpt, alpaca (both): log-normal lengths with the data sets' means",
    )
    bench.add_argument("--num-requests", type=count, metavar="N", help="requests (1000 or 5000)")
    bench.add_argument("--seed", type=int, metavar="INT", help="of the lengths (each trace's own)")
    bench.add_argument(
        "--slots", type=count, default=15_728, metavar="N", help="tokens the pool holds (15728)"
    )
    bench.add_argument(
        "--block-size", type=count, default=16, metavar="N", help="tokens in a paged block (16)"
    )
    bench.add_argument(
        "--max-model-len", type=count, default=2048, metavar="N", help="longest request (2048)"
    )
    bench.add_argument(
        "--max-num-seqs", type=count, default=1024, metavar="N", help="most at once (1024)"
    )
    bench.add_argument(
        "--max-num-batched-tokens", type=count, default=2048, metavar="N",
        help="tokens in a step (2048)",
    )  # fmt: skip
    bench.add_argument(
        "--allocator",
        choices=["buddy", "first-fit"],
        default="buddy",
        help="of the contiguous strategies (buddy)",
    )
    add_output_options(bench)


def run(options: argparse.Namespace) -> None:
    """Replays and prints."""
    require_plots(options)
    from octavo.core.entry.bench import kv_report
    from octavo.core.entry.bench.kv_waste import Pool, make_trace, replay_all
    from octavo.core.entry.bench.stats import write_json

    pool = Pool(
        slots=options.slots,
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    traces = {
        name: make_trace(name, pool.max_model_len, options.num_requests, options.seed)
        for name in dict.fromkeys(options.trace.split(","))
    }
    results = {}
    for name, trace in traces.items():
        results[name] = trace, replay_all(trace, pool, options.allocator)
        print(kv_report.table(name, results[name][0], pool, results[name][1]) + "\n")
    print(kv_report.NOTE)
    if options.json is not None:
        found = kv_report.record(results, pool, options.allocator, options.seed)
        write_json(options.json, found)
    write_plots(options, kv_report.plot, results)
