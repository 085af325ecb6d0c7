"""Options made from the settings, so that flags, files and variables cannot drift apart."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from octavo.core.config import ConfigError, EngineConfig, parse_bytes
from octavo.core.entry.cli.settings import (
    ENGINE,
    SERVER,
    Setting,
    Value,
    engine_values,
    json_object,
    resolve,
    split,
)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _json(text: str) -> dict[str, Any]:
    try:
        return json_object(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'must be a JSON object, as {{"method": "ngram"}}, got {text!r}'
        ) from None


_TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "strs": str,
    "size": _bytes,
    "list": split,
    "json": _json,
}


def add_options(parser: Any, settings: tuple[Setting, ...]) -> None:
    """One option for each setting. What the command line leaves out is absent from the result."""
    for setting in settings:
        text = setting.help
        if setting.default not in (None, ()):
            text += f" (default: {setting.default})"
        options: dict[str, Any] = {
            "help": text.replace("%", "%%"),
            "default": argparse.SUPPRESS,
            "dest": setting.name,
        }
        if setting.kind == "bool":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = _TYPES[setting.kind]
            options["metavar"] = setting.metavar or setting.kind.upper()
        if setting.kind == "strs":
            options["nargs"] = "+"
        if setting.name == "model":
            options["help"] = argparse.SUPPRESS
        parser.add_argument(setting.flag, **options)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """MODEL, --config, and one option for each field of `EngineConfig`, named as vLLM names them."""
    parser.add_argument("MODEL", nargs="?", default=None, help=ENGINE[0].help)
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--config",
        metavar="FILE",
        dest="config_file",
        help="YAML or TOML file with any of these options; flags and OCTAVO_* variables outrank it",
    )
    group.add_argument(
        "--show-config",
        action="store_true",
        help="print every value and where it comes from, and leave",
    )
    add_options(group, ENGINE)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """One option for each field of `ServerOptions`."""
    add_options(parser.add_argument_group("server"), SERVER)


def settings_of(
    options: argparse.Namespace, settings: tuple[Setting, ...] = ENGINE
) -> dict[str, Value]:
    """Every setting's value and origin, out of the command line and what stands behind it.

    Raises:
        ConfigError: two models, an unknown key or variable, or a value of the wrong kind.
    """
    names = {setting.name for setting in settings}
    flags = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name in names
    }
    if options.MODEL is not None:
        if flags.get("model", options.MODEL) != options.MODEL:
            raise ConfigError(f"two models: {options.MODEL!r} and --model {flags['model']!r}")
        flags["model"] = options.MODEL
    values = resolve(flags, settings, config_file=options.config_file)
    if options.MODEL is not None:
        values["model"] = Value(options.MODEL, "MODEL")
    return values


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's configuration.

    Raises:
        ConfigError: values that cannot be used, or two models.
    """
    return engine_values(settings_of(options))


def engine_arguments(options: argparse.Namespace) -> list[str]:
    """The engine's options as they were given, for the command line of another process."""
    words = [] if options.MODEL is None else [options.MODEL]
    if getattr(options, "config_file", None) is not None:
        words.append(f"--config={options.config_file}")
    for setting in ENGINE:
        if setting.name not in options:
            continue
        value = getattr(options, setting.name)
        if isinstance(value, bool):
            words.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        else:
            text = json.dumps(value) if setting.kind == "json" else value
            words.append(f"{setting.flag}={text}")
    return words
