"""`octavo bench serve`: latency and throughput of a server under load."""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError
from octavo.core.entry.cli.bench_options import (
    add_output_options,
    count,
    counts,
    require_plots,
    warned_if_busy,
    write_plots,
)
from octavo.core.entry.cli.failure import CommandFailed
from octavo.core.entry.cli.options import add_engine_options, engine_arguments, engine_config

if TYPE_CHECKING:
    from octavo.core.entry.bench.http_client import Client
    from octavo.core.entry.bench.serving import Point, Target
    from octavo.core.entry.bench.workload import Workload

_START_SECONDS = 1800.0  # a model may have to be fetched


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "serve",
        help="a server under load: TTFT, TPOT, ITL, E2E, throughput, goodput",
        description="Sends a workload to an OpenAI-compatible server, by --url or started for MODEL "
        "in a process of its own, once for each rate and each limit of concurrency.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument("--url", help="server to measure; without it one is started for MODEL")
    bench.add_argument(
        "--api-key", metavar="KEY", help="sent as Authorization: Bearer (with --url)"
    )
    bench.add_argument(
        "--api", choices=["completions", "chat"], default="completions", help="(completions)"
    )
    bench.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="whose tokens prompts are counted in (with --url; without it words are counted, and "
        "prompts sent as text)",
    )
    bench.add_argument(
        "--workload",
        default="sharegpt",
        metavar="NAME",
        help="sharegpt, json, uniform, prefix, single or a .jsonl file (sharegpt)",
    )
    bench.add_argument("--num-requests", type=count, metavar="N", help="requests (sharegpt: 64)")
    bench.add_argument(
        "--rate",
        type=_rates,
        default=[math.inf],
        metavar="R[,R]",
        help="Poisson arrivals, requests a second; inf: all at once (inf)",
    )
    bench.add_argument(
        "--concurrency",
        type=counts,
        metavar="N[,N]",
        help="most requests under way; the others wait in the client (no limit)",
    )
    bench.add_argument(
        "--goodput",
        type=_limits,
        default={},
        metavar="KEY:MS[,KEY:MS]",
        help="count requests within limits of ttft, tpot and e2e, in milliseconds",
    )
    bench.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="SECONDS", help="of a request (600)"
    )
    bench.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for output of exactly the workload's length (yes)",
    )
    bench.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="merged into each request"
    )
    add_output_options(bench)
    add_engine_options(parser)


def _rates(text: str) -> list[float]:
    return [_positive(part, "a rate", infinite=True) for part in text.split(",")]


def _seconds(text: str) -> float:
    return _positive(text, "the timeout")


def _positive(text: str, what: str, *, infinite: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0 or (math.isinf(value) and not infinite):
        raise argparse.ArgumentTypeError(f"{what} must be a number above 0, got {text!r}")
    return value


def _limits(text: str) -> dict[str, float]:
    found = {}
    for part in text.split(","):
        key, colon, value = part.partition(":")
        if key not in ("ttft", "tpot", "e2e") or not colon or key in found:
            raise argparse.ArgumentTypeError(
                f"must be as ttft:500,tpot:50 with ttft, tpot or e2e once each, got {text!r}"
            )
        found[key] = _positive(value, f"the limit of {key}")
    return found


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def run(options: argparse.Namespace) -> None:
    """Measures and prints.

    Raises:
        CommandFailed: the server cannot be started or reached, or no request succeeded.
    """
    require_plots(options)
    from octavo.core.entry.bench.http_client import Client
    from octavo.core.entry.bench.server_process import API_KEY, started

    workload, text = _workload(options)
    warning = warned_if_busy()
    with ExitStack() as stack:
        server = None
        if options.url is None:
            server = stack.enter_context(started(engine_arguments(options)))
            print("starting the server …", file=sys.stderr)
        client = Client(server.url, API_KEY) if server else Client(options.url, options.api_key)

        async def measure() -> tuple[Target, list[Point]]:
            if server is not None:
                await server.wait_ready(client, _START_SECONDS)
            return await _measure(options, client, workload, text)

        target, points = _event_loop_run(measure())
    _report(options, workload, target, points, warning)


def _workload(options: argparse.Namespace) -> tuple[Workload, Any]:
    """The requests, and what turns token ids into text (None: the ids are sent)."""
    from octavo.core.entry.bench.serving import Words
    from octavo.core.entry.bench.workload import make_workload
    from octavo.core.entry.front import load_front, load_progress

    asked = {"num_requests": options.num_requests, "seed": getattr(options, "seed", None)}
    config = engine_config(options)
    if options.url is None:
        for name in ("api_key", "tokenizer"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --url")
    else:
        given = [word for word in engine_arguments(options) if word.startswith("--")]
        unused = [word for word in given if word.split("=")[0] not in ("--model", "--seed")]
        if unused:
            raise ConfigError(f"{', '.join(unused)}: options of an engine, which --url already has")
        if options.tokenizer is None:
            words = Words()
            return make_workload(options.workload, words.encode, **asked), words.decode
        config = config.with_values(model=options.tokenizer)
    tokenizer = load_front(config, load_progress(config)).tokenizer
    made = make_workload(
        options.workload, lambda text: tokenizer.encode(text, add_special_tokens=False), **asked
    )
    return made, tokenizer.decode if options.api == "chat" else None


async def _measure(
    options: argparse.Namespace, client: Client, workload: Workload, text: Any
) -> tuple[Target, list[Point]]:
    from octavo.core.entry.bench.server_process import served_model
    from octavo.core.entry.bench.serving import Target, sweep

    named = options.MODEL or getattr(options, "model", None)
    model = named if options.url and named else await served_model(client)
    target = Target(model, options.api, text, options.ignore_eos, options.extra_body)

    def on_point(rate: float, limit: int | None) -> None:
        bound = "" if limit is None else f", at most {limit} under way"
        print(f"{len(workload.items)} requests, rate {rate:g}{bound} …", file=sys.stderr)

    points = await sweep(
        client,
        target,
        workload,
        options.rate,
        options.concurrency or [None],
        timeout=options.timeout,
        on_point=on_point,
    )
    client.close()
    return target, points


def _event_loop_run(coroutine: Any) -> Any:
    """On uvloop where there is one: it halves what a chunk costs the client."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        import asyncio

        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


def _report(
    options: argparse.Namespace,
    workload: Workload,
    target: Target,
    points: list[Point],
    warning: str | None,
) -> None:
    from octavo.core.entry.bench import serving_report
    from octavo.core.entry.bench.machine import describe
    from octavo.core.entry.bench.serving import FORMULAS
    from octavo.core.entry.bench.stats import write_json

    values = [point.values(options.goodput) for point in points]
    print(
        f"{target.model}, workload {workload.name}: {len(workload.items)} requests of "
        f"{workload.prompt_tokens:,} prompt and {workload.output_tokens:,} output tokens, seed "
        f"{workload.seed}, by {target.api}\n\n{serving_report.tables(values, options.goodput)}"
    )
    if options.json is not None:
        found = {
            "format": 1,  # counts changes of the meaning
            "model": target.model,
            "api": target.api,
            "url": options.url,
            "server_arguments": None if options.url else engine_arguments(options),
            "workload": {
                "name": workload.name,
                "seed": workload.seed,
                "requests": len(workload.items),
                "output_tokens": workload.output_tokens,
            },
            "goodput_limits_ms": options.goodput,
            "formulas": FORMULAS,
            "points": values,
            "machine": describe(),
            "disturbed": warning,
        }
        write_json(options.json, found)
    write_plots(options, serving_report.plot, values, target.model)
    if not any(point.run.good for point in points):
        raise CommandFailed("no request succeeded")
