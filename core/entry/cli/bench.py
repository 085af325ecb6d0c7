"""`octavo bench`: its kinds, and `throughput`: tokens per second, alone or beside transformers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.entry.cli import (
    bench_embeddings,
    bench_kv_waste,
    bench_latency,
    bench_linear,
    bench_perplexity,
    bench_roofline,
    bench_scaling,
    bench_scheduler,
    bench_serve,
    bench_sharing,
    bench_speculation,
    bench_startup,
    bench_swap,
    bench_variants,
)
from octavo.core.entry.cli.bench_options import count, prepared, warned_if_busy
from octavo.core.entry.cli.failure import CommandFailed
from octavo.core.entry.cli.options import add_engine_options

if TYPE_CHECKING:
    from octavo.core.entry.bench.compare import Comparison
    from octavo.core.entry.bench.profile import Profile
    from octavo.core.entry.bench.throughput import Bench, Throughput
    from octavo.core.entry.bench.workload import Workload
    from octavo.core.entry.front import Front


_KINDS = {
    "latency": bench_latency,
    "serve": bench_serve,
    "kv-waste": bench_kv_waste,
    "scheduler": bench_scheduler,
    "startup": bench_startup,
    "perplexity": bench_perplexity,
    "roofline": bench_roofline,
    "linear": bench_linear,
    "scaling": bench_scaling,
    "speculation": bench_speculation,
    "sharing": bench_sharing,
    "variants": bench_variants,
    "swap": bench_swap,
    "embeddings": bench_embeddings,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    _add_throughput(kinds)
    for module in _KINDS.values():
        module.add_parser(kinds)


def _add_throughput(kinds: Any) -> None:
    throughput = kinds.add_parser(
        "throughput",
        help="many requests at once, output tokens per second",
        description="Submits a workload at once, greedy and with fixed output lengths, and counts.",
        allow_abbrev=False,
    )
    bench = throughput.add_argument_group("benchmark")
    bench.add_argument(
        "--workload",
        default="sharegpt",
        metavar="NAME",
        help="sharegpt, json, uniform, prefix, single or a .jsonl file (sharegpt)",
    )
    bench.add_argument(
        "--num-requests",
        type=count,
        metavar="N",
        help="requests (sharegpt: 64); --seed draws other lengths",
    )
    bench.add_argument(
        "--compare", choices=["transformers"], help="run the first 16 requests there too"
    )
    bench.add_argument(
        "--profile", action="store_true", help="time the parts of a step (costs a little)"
    )
    bench.add_argument(
        "--busy-neighbour", type=count, metavar="N",
        help="run it again while N other processes spin, and tell what is left",
    )  # fmt: skip
    bench.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")
    add_engine_options(throughput)


def run(options: argparse.Namespace) -> None:
    """Measures and prints.

    Raises:
        CommandFailed: transformers' tokens differ where it was no tie.
    """
    if options.kind in _KINDS:
        _KINDS[options.kind].run(options)
        return
    config = prepared(options)
    from octavo.core.entry.bench.workload import make_workload
    from octavo.core.entry.front import load_front, load_progress

    progress = load_progress(config)
    front = load_front(config, progress)
    workload = make_workload(
        options.workload,
        lambda text: front.tokenizer.encode(text, add_special_tokens=False),
        num_requests=options.num_requests,
        seed=getattr(options, "seed", None),
    )
    if options.compare is not None and any(item.schema for item in workload.items):
        raise ConfigError(
            f"workload {workload.name} asks for structured output, which transformers has not: leave out "
            "--compare, or take another workload"
        )
    _measure(options, config, front, workload, warned_if_busy())


def _measure(
    options: argparse.Namespace,
    config: EngineConfig,
    front: Front,
    workload: Workload,
    warning: str | None,
) -> None:
    from octavo.core.entry.bench import report
    from octavo.core.entry.bench.profile import Profile
    from octavo.core.entry.bench.throughput import Bench
    from octavo.core.entry.front import load_progress
    from octavo.core.entry.wiring import build_engine

    profile: Profile | None = Profile() if options.profile else None
    engine = build_engine(config, files=front.files, progress=load_progress(config))
    try:
        bench = Bench(engine, front.tokenizer)
        bench.check(workload)
        bench.run(workload.warm_up)
        with _bar("octavo", workload.output_tokens, config) as on_tokens:
            result = bench.run(workload.items, on_tokens, profile)
        beside = _beside(options, bench, workload)
    finally:
        engine.shutdown()
    comparison = _compare(options, config, front, workload, result)
    for name, load in (
        ("octavo", result.load),
        ("transformers", comparison.load if comparison else None),
    ):
        if load is not None and load.disturbed:
            warning = f"while {name} ran, {load}"
            print(f"warning: {warning}", file=sys.stderr)
    print(report.table(workload, engine.info, result, comparison))
    if beside is not None:
        print("\n" + report.neighbour_line(options.busy_neighbour, result, beside))
    if profile is not None:
        print("\n" + report.profile_table(profile))
    if options.json is not None:
        found = report.record(workload, config, engine.info, result, comparison, profile, warning)
        if beside is not None:
            found["busy_neighbour"] = report.neighbour_record(
                options.busy_neighbour, result, beside
            )
        try:
            options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise CommandFailed(f"{options.json} cannot be written: {error}") from error
    if comparison is not None and engine.info.numbers == "float32":
        _check_tokens(comparison)


def _beside(options: argparse.Namespace, bench: Bench, workload: Workload) -> Throughput | None:
    """The workload once more beside --busy-neighbour processes."""
    if options.busy_neighbour is None:
        return None
    from octavo.core.entry.bench.neighbours import spinning

    with spinning(options.busy_neighbour):
        return bench.run(workload.again().items)


def _check_tokens(comparison: Comparison) -> None:
    from octavo.core.entry.bench.compare import TIE_MARGIN

    wrong = [d.request for d in comparison.differences if d.margin >= TIE_MARGIN]
    if wrong:
        raise CommandFailed(
            f"float32 tokens differ from transformers' where it was no tie (margin of at least "
            f"{TIE_MARGIN:g} logits): requests {wrong}"
        )


def _compare(
    options: argparse.Namespace,
    config: EngineConfig,
    front: Front,
    workload: Workload,
    result: Throughput,
) -> Comparison | None:
    if options.compare is None:
        return None
    from octavo.core.entry.bench.compare import NUM_COMPARED, compare
    from octavo.core.entry.wiring import resolve_device

    assert front.files is not None
    found = resolve_device(config.device)
    device = found.backend.torch_device(found.device)
    total = sum(item.output_len for item in workload.items[:NUM_COMPARED])
    try:
        with _bar("transformers", total, config) as on_tokens:
            return compare(front.files, device, workload, result.tokens, on_tokens)
    except ImportError as error:
        raise ConfigError(
            f"--compare transformers needs transformers ({error}): pip install 'octavo[hf]'"
        ) from error


@contextmanager
def _bar(name: str, total: int, config: EngineConfig) -> Iterator[Callable[[int], None] | None]:
    """A bar of output tokens on standard error; nothing when that is no terminal."""
    if not (config.load_progress and sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} tokens"),
        TextColumn("{task.speed:.0f}/s"),
        TimeElapsedColumn(),
    )
    # A refresh thread would take its share of the cores being measured: refresh twice a second.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as bars:
        task = bars.add_task(name, total=total)
        yield lambda count: bars.advance(task, count)
