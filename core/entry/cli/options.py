"""Options made from `EngineConfig`'s fields, so that the two cannot drift apart."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from octavo.core.config import ConfigError, EngineConfig, parse_bytes

_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
_FIELDS = tuple(field.name for field in fields(EngineConfig))


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """MODEL and one option for each field of `EngineConfig`, named as vLLM names them."""
    group = parser.add_argument_group("engine")
    for field in fields(EngineConfig):
        text = field.metadata.get("help", "")
        if field.default not in (None, MISSING):
            text += f" (default: {field.default})"
        kind = str(field.type).removesuffix(" | None")
        options: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS, "dest": field.name}
        if field.name == "model":
            parser.add_argument("MODEL", nargs="?", default=None, help=text)
            options["help"] = argparse.SUPPRESS
        if kind == "bool":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = _bytes if field.name == "kv_memory" else _TYPES[kind]
            options["metavar"] = kind.upper()
        group.add_argument(f"--{field.name.replace('_', '-')}", **options)


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The configuration that the command line asks for.

    Raises:
        ConfigError: values that cannot be used, or two models.
    """
    given = {name: value for name, value in vars(options).items() if name in _FIELDS}
    if options.MODEL is not None:
        if given.get("model", options.MODEL) != options.MODEL:
            raise ConfigError(f"two models: {options.MODEL!r} and --model {given['model']!r}")
        given["model"] = options.MODEL
    return EngineConfig.from_kwargs(**given)


def engine_arguments(options: argparse.Namespace) -> list[str]:
    """The engine's options as they were given, for the command line of another process."""
    words = [] if options.MODEL is None else [options.MODEL]
    for name in _FIELDS:
        if name not in options:
            continue
        value, flag = getattr(options, name), name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag}={value}")
    return words
