"""`octavo plan`: whether a model fits, before it is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from octavo.core.config import ConfigError, parse_bytes, prepare_thread_environment
from octavo.core.entry.cli.options import add_engine_options, engine_config
from octavo.core.entry.cli.sizes import count_text, size_text

if TYPE_CHECKING:
    from octavo.core.entry.fit import Fit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--typical-len",
        type=int,
        default=1024,
        metavar="N",
        help="prompt and output of a usual request, tokens (default: 1024)",
    )
    plan.add_argument(
        "--memory", metavar="SIZE", help="memory free on the device, instead of measuring it"
    )
    plan.add_argument("--json", action="store_true", help="JSON instead of text")
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Prints what a start would come to; ends with exit code 2 when it would fail."""
    if options.typical_len < 1:
        raise ConfigError(f"--typical-len must be at least 1, got {options.typical_len}")
    memory = None if options.memory is None else parse_bytes(options.memory)
    config = engine_config(options)
    prepare_thread_environment()
    from octavo.core.entry.fit import fit
    from octavo.core.entry.front import load_progress

    result = fit(
        config, typical_len=options.typical_len, memory=memory, progress=load_progress(config)
    )
    print(json.dumps(asdict(result)) if options.json else text(result))
    if not result.fits:
        sys.exit(2)


def text(result: Fit) -> str:
    """The plan for people."""
    rows = [
        (
            "model",
            f"{result.model} ({result.architecture}), {count_text(result.parameters)} parameters",
        ),
        (
            "device",
            f"{result.device}: {size_text(result.memory_free)} free of "
            f"{size_text(result.memory_total)} ({result.device_reason})",
        ),
        ("weights", f"{size_text(result.weight_bytes)} in {result.quantization or result.dtype}"),
        ("KV cache", f"{size_text(result.kv_bytes_per_token)} a token in {result.kv_dtype}"),
    ]
    if result.fits:
        cache = result.num_kv_blocks * result.block_bytes
        rows += [
            (
                "",
                f"{result.num_kv_blocks} blocks of {result.block_size}: {result.cache_tokens} "
                f"tokens, {size_text(cache)}",
            ),
            (
                "at once",
                f"{result.concurrent_at_max_model_len} requests of {result.max_model_len} tokens "
                "(max_model_len)",
            ),
            (
                "",
                f"{result.concurrent_at_typical_len} requests of {result.typical_len} tokens; at "
                f"most {result.max_num_seqs} (max_num_seqs)",
            ),
            ("limit", result.limit or ""),
        ]
        if result.host_bytes:
            blocks = result.host_bytes // result.block_bytes
            rows.append(
                ("swap", f"{blocks} blocks in {size_text(result.host_bytes)} of host memory")
            )
    rows += [("change", advice) for advice in result.advice]
    rows += [("note", note) for note in result.notes]
    rows.append(("fits", "yes" if result.fits else f"no: {result.problem}"))
    return "\n".join(f"{name:<9} {value}" for name, value in rows)
