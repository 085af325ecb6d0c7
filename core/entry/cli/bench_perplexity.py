"""`octavo bench perplexity`: what smaller weights and caches cost in quality."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.entry.cli.bench_options import count, prepared
from octavo.core.entry.cli.options import add_engine_options, add_options
from octavo.core.entry.cli.settings import ENGINE

if TYPE_CHECKING:
    from octavo.core.entry.bench.perplexity import Scores
    from octavo.core.entry.front import Front

_PLAIN = "--dtype float32 --kv-cache-dtype float32"
DEFAULT_VARIANTS = (
    ("float32", _PLAIN),
    ("float32, KV float16", "--dtype float32 --kv-cache-dtype float16"),
    ("float16", "--dtype float16"),
    ("int8", "--quantization int8"),
    ("int4", "--quantization int4"),
)


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "perplexity",
        help="quality of smaller weights: perplexity of a text in several variants",
        description="Scores a text with each variant of the engine's options and compares every "
        "position with the first variant's.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument(
        "--variant",
        action="append",
        type=variant,
        metavar="NAME=FLAGS",
        help="an engine to compare, as 'int8=--quantization int8'; may be given again, the first "
        "is what the others are compared with (default: "
        + "; ".join(f"{name}" for name, _ in DEFAULT_VARIANTS)
        + ")",
    )
    bench.add_argument("--text", type=Path, metavar="FILE", help="text to score (Newton's Opticks)")
    bench.add_argument(
        "--num-tokens", type=count, default=4096, metavar="N", help="tokens of it (4096)"
    )
    bench.add_argument(
        "--window", type=count, default=512, metavar="N", help="tokens seen at once (512)"
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")
    add_engine_options(parser)


def variant(text: str) -> tuple[str, str]:
    """An argument NAME=FLAGS."""
    name, sign, flags = text.partition("=")
    if not name or not sign:
        raise argparse.ArgumentTypeError(f"must be NAME=FLAGS, got {text!r}")
    return name, flags


def with_flags(config: EngineConfig, flags: str) -> EngineConfig:
    """A configuration changed by engine options as the command line takes them.

    Raises:
        ConfigError: options that are not known or cannot be used.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_options(parser, ENGINE)
    try:
        given, unknown = parser.parse_known_args(shlex.split(flags))
    except (argparse.ArgumentError, ValueError) as error:
        raise ConfigError(f"--variant flags {flags!r}: {error}") from None
    if unknown:
        raise ConfigError(f"--variant flags {flags!r}: {unknown[0]!r} is no engine option")
    return config.with_values(**vars(given))


def run(options: argparse.Namespace) -> None:
    """Measures and prints."""
    config = prepared(options)
    from octavo.core.entry.bench import perplexity
    from octavo.core.entry.front import load_front, load_progress

    variants = options.variant or DEFAULT_VARIANTS
    configs = [(name, with_flags(config, flags)) for name, flags in variants]
    front = load_front(configs[0][1], load_progress(config))
    ids = front.tokenizer.encode(_text(options.text), add_special_tokens=False)
    pieces = perplexity.windows(ids, options.window, options.num_tokens)
    rows: list[perplexity.Row] = []
    first: Scores | None = None
    for name, changed in configs:
        try:
            same = (changed.model, changed.revision) == (
                configs[0][1].model,
                configs[0][1].revision,
            )
            scores = _score(changed, front if same else None, pieces)
        except ConfigError as error:
            if options.variant or first is None:
                raise
            print(f"left out {name}: {error}", file=sys.stderr)  # this device does not offer it
            continue
        first = first or scores
        rows.append(perplexity.compare(name, first, scores))
        print(f"{name}: {scores.perplexity:.3f}", file=sys.stderr)
    positions = sum(len(piece) - 1 for piece in pieces)
    print(f"{front.name}, {positions} positions in windows of {options.window}\n")
    print(perplexity.table(rows))
    if options.json is not None:
        _write(options, config, variants, rows, positions)


def _text(path: Path | None) -> str:
    from octavo.core.entry.bench.perplexity import default_text

    if path is None:
        return default_text()
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from None


def _score(config: EngineConfig, front: Front | None, pieces: list[list[int]]) -> Scores:
    from octavo.core.entry.bench.perplexity import TOP, score
    from octavo.core.entry.wiring import build_engine

    if config.max_logprobs >= 0:
        config = config.with_values(max_logprobs=max(config.max_logprobs, TOP))
    engine = build_engine(config, files=front.files if front else None)
    try:
        return score(engine, pieces)
    finally:
        engine.shutdown()


def _write(
    options: argparse.Namespace,
    config: EngineConfig,
    variants: Any,
    rows: list[Any],
    positions: int,
) -> None:
    import msgspec

    from octavo.core.entry.bench import perplexity
    from octavo.core.entry.bench.machine import describe
    from octavo.core.entry.bench.stats import write_json

    flags = dict(variants)
    record = {
        "format": 1,  # counts changes of the meaning
        "text": str(options.text) if options.text is not None else perplexity.TEXT,
        "positions": positions,
        "window": options.window,
        "variants": [
            {
                **{k: v for k, v in dataclasses.asdict(row).items() if k != "info"},
                "flags": flags[row.name],
                "engine": msgspec.to_builtins(row.info),
            }
            for row in rows
        ],
        "formulas": perplexity.FORMULAS,
        "machine": describe(),
        "config": dataclasses.asdict(config),
    }
    write_json(options.json, record)
