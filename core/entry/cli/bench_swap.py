"""`octavo bench swap`: preempting by recompute and by swap, and the prefix cache's second level."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from octavo.core.entry.cli.bench_options import add_record_options, count, watched
from octavo.core.entry.cli.options import add_engine_options, engine_config


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "swap",
        help="KV blocks in host memory against computing them again",
        description="Runs a load that the KV cache is too small for, and prompts that come back after they "
        "were evicted, with blocks kept in host memory and without. Sizes of the cache and of host memory "
        "are the benchmark's.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--requests", type=count, default=24, metavar="N",
        help="requests at once, with ShareGPT-like lengths (24)",
    )  # fmt: skip
    bench.add_argument(
        "--max-output", type=count, default=256, metavar="N", help="output tokens of each (256)"
    )
    bench.add_argument(
        "--pool", type=count, default=30, metavar="PERCENT",
        help="the KV cache, in percent of what all of these need at once (30)",
    )  # fmt: skip
    bench.add_argument(
        "--prompts", type=count, default=8, metavar="N", help="prompts that come back (8)"
    )
    bench.add_argument(
        "--prompt-len", type=count, default=512, metavar="N", help="tokens of each (512)"
    )
    bench.add_argument(
        "--repeats",
        type=count,
        default=3,
        metavar="N",
        help="turns of each way, the fastest counts (3)",
    )
    add_record_options(bench)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Measures and prints."""
    from octavo.core.config import prepare_thread_environment

    prepare_thread_environment()
    config = engine_config(options)
    from octavo.core.entry.bench import swap
    from octavo.core.entry.bench.kv_waste import make_trace
    from octavo.core.entry.bench.throughput import Bench
    from octavo.core.entry.bench.workload import fixed_lengths
    from octavo.core.entry.fit import fit
    from octavo.core.entry.front import load_front, load_progress
    from octavo.core.entry.wiring import build_engine

    progress = load_progress(config)
    front = load_front(config, progress)
    planned = fit(config, progress=progress)
    size = planned.block_size

    def encode(text: str) -> list[int]:
        return front.tokenizer.encode(text, add_special_tokens=False)

    def blocks(items: Any) -> int:
        return sum(-(-(len(i.prompt_token_ids) + i.output_len) // size) for i in items)

    trace = _lengths(make_trace("sharegpt", 1024, options.requests), options.max_output)
    warm_up = [(64, 8)]
    crowd = fixed_lengths(encode, warm_up + trace)
    turns = fixed_lengths(encode, warm_up + [(options.prompt_len, 16)] * options.prompts)

    def build(way: Any) -> Any:
        engine = build_engine(swap.configured(config, way), files=front.files, progress=progress)
        return engine, Bench(engine, front.tokenizer)

    def tell(what: str) -> None:
        print(f"measuring {what} …", file=sys.stderr)

    longest = max(blocks([item]) for item in crowd)
    small = 1 + max(longest, blocks(crowd) * options.pool // 100)
    few = 1 + blocks(turns[1:2]) + blocks(turns) * options.pool // 100
    with watched(options, config) as record:
        found = []
        for load, method, items, pool in (
            ("at once", swap.run_together, crowd, small),
            ("by turns", swap.run_by_turns, turns, few),
        ):
            each = swap.ways(pool, planned.block_bytes, blocks(items))
            found += swap.measure(build, each, load, method, items, options.repeats, tell)
        record(swap.record(found), None)
    print(
        f"{planned.model} ({planned.device}), blocks of {size}, {planned.block_bytes:,} bytes each\n"
    )
    print(swap.table(found, as_markdown=options.markdown))


def _lengths(trace: Any, most: int) -> list[tuple[int, int]]:
    """(prompt, output) of each request, no output longer than `most` tokens."""
    return [(lengths.prompt, min(most, lengths.output)) for lengths in trace]
