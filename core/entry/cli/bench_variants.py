"""`octavo bench variants`: what an engine option brings, or costs."""

from __future__ import annotations

import argparse
import shlex
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.core.config import ConfigError
from octavo.core.entry.cli.bench_options import (
    add_record_options,
    count,
    measuring,
    prepared,
    watched,
)
from octavo.core.entry.cli.options import add_engine_options, engine_arguments, engine_config

if TYPE_CHECKING:
    from octavo.core.config import EngineConfig

_OF_THE_PROCESS = ("threads", "cpu_affinity", "numa_node")


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "variants",
        help="one workload under several configurations, turn by turn",
        description="Runs a workload under the given engine options, and under these and each --variant's own, in "
        "turn in one process, and tells how many times as fast each variant is.",
        epilog="example: octavo bench variants --workload prefix --variant 'no cache=--no-enable-prefix-caching'",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--variant", action="append", required=True, metavar="NAME=FLAGS", dest="variants",
        help="engine options beside the command's own; may be given several times",
    )  # fmt: skip
    bench.add_argument(
        "--workload", default="sharegpt", metavar="NAME",
        help="sharegpt, json, uniform, prefix, single or a .jsonl file (sharegpt)",
    )  # fmt: skip
    bench.add_argument("--num-requests", type=count, metavar="N", help="requests (sharegpt: 64)")
    bench.add_argument("--repeats", type=count, default=3, metavar="N", help="rounds (3)")
    add_record_options(bench)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Measures and prints.

    Raises:
        ConfigError: a variant that cannot be run beside the others.
    """
    config = prepared(options)
    configs = _configs(options, config)
    from octavo.core.entry.bench import variants
    from octavo.core.entry.bench.throughput import Bench
    from octavo.core.entry.bench.workload import make_workload
    from octavo.core.entry.front import load_front, load_progress
    from octavo.core.entry.wiring import build_engine

    front = load_front(config, load_progress(config))
    workload = make_workload(
        options.workload,
        lambda text: front.tokenizer.encode(text, add_special_tokens=False),
        num_requests=options.num_requests,
        seed=getattr(options, "seed", None),
    )
    with ExitStack() as stack:
        benches = {}
        for name, own in configs.items():
            engine = build_engine(own, files=front.files, progress=load_progress(own))
            stack.callback(engine.shutdown)
            benches[name] = Bench(engine, front.tokenizer)
        with watched(options, config) as record:
            found = variants.measure(benches, workload, options.repeats, measuring)
            info = benches["base"].engine.info
            record(variants.record(found, workload), info)
    print(f"{info.name} ({info.device}, {info.numbers}), workload {workload.name}\n")
    print(variants.table(found, as_markdown=options.markdown))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _configs(options: argparse.Namespace, base: EngineConfig) -> dict[str, EngineConfig]:
    found = {"base": base}
    for text in options.variants:
        name, equals, flags = text.partition("=")
        name = name.strip()
        if not (name and equals and flags.strip()) or name.startswith("-"):
            raise ConfigError(
                f"--variant must be NAME=FLAGS, as 'no cache=--no-enable-prefix-caching', got {text!r}"
            )
        if name in found:
            raise ConfigError(f"--variant {name!r} is there twice, or is the command's own")
        parser = _Parser(allow_abbrev=False, add_help=False)
        add_engine_options(parser)
        try:
            own = parser.parse_args([*engine_arguments(options), *shlex.split(flags)])
            config = engine_config(own)
        except ValueError as error:  # ConfigError is one
            raise ConfigError(f"--variant {name!r}: {error}") from error
        for field in ("model", "revision", *_OF_THE_PROCESS):
            if getattr(config, field) != getattr(base, field):
                raise ConfigError(
                    f"--variant {name!r} changes {field}, which all variants have in common: run the command twice"
                )
        found[name] = config
    return found
