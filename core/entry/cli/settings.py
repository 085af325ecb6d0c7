"""One configuration out of flags, environment, file and defaults, and where each value came from.

Flags win over OCTAVO_* variables, these over the file (--config), that over the defaults. Every key
must be known to some command; one that the present command has no use for is no error in a file or
in the environment, because one file describes a deployment that several commands look at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from octavo.core.config import (
    PREFIX,
    ConfigError,
    EngineConfig,
    elsewhere,
    environment,
    nearest,
    parse_bytes,
)

Kind = Literal["str", "int", "float", "bool", "size", "strs", "list", "json"]
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be configured. size: bytes, written with a suffix or without. strs: several
    words behind the flag; list: one word, with commas between the items; json: an object.

    field: the name in the frozen object it ends in, where that differs.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    secret: bool = False
    field: str | None = None

    @property
    def flag(self) -> str:
        """As written on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As written in the environment."""
        return PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value and its origin: a flag, a variable, a file, or "default"."""

    value: Any
    origin: str


def _engine_setting(field: Any) -> Setting:
    kind = str(field.type).removesuffix(" | None")
    for special in ("size", "json"):
        kind = special if field.metadata.get(special) else kind
    return Setting(
        field.name,
        kind,  # type: ignore[arg-type]
        None if field.default is MISSING else field.default,
        field.metadata.get("help", ""),
        metavar=field.metadata.get("metavar"),
    )


ENGINE = tuple(_engine_setting(field) for field in fields(EngineConfig))
SERVER = (
    Setting("host", "str", "127.0.0.1", "address to listen on"),
    Setting("port", "int", 8000, "port to listen on; 0: any free one"),
    Setting(
        "served_model_name",
        "strs",
        (),
        "names in the API instead of the model's own; the first stands in answers",
        metavar="NAME",
    ),
    Setting(
        "uds",
        "str",
        None,
        "path of a Unix socket to listen at instead of host and port",
        metavar="PATH",
    ),
    Setting("ssl_certfile", "str", None, "certificate chain (PEM): serve https", metavar="FILE"),
    Setting("ssl_keyfile", "str", None, "its private key, if not in the same file", metavar="FILE"),
    Setting(
        "api_key",
        "list",
        (),
        "keys of which clients must send one (Authorization: Bearer); better in OCTAVO_API_KEY, where "
        "no process list shows them",
        metavar="KEY[,KEY]",
        secret=True,
        field="api_keys",
    ),
    Setting(
        "allowed_origins",
        "list",
        (),
        "web pages that may call this server (CORS), as https://chat.example; *: all",
        metavar="ORIGIN[,ORIGIN]",
    ),
    Setting("allow_credentials", "bool", False, "let these pages send cookies"),
    Setting("log_level", "str", "info", f"one of {', '.join(LOG_LEVELS)}", choices=LOG_LEVELS),
    Setting(
        "max_queue",
        "int",
        None,
        "requests that may wait for their first token; the next gets a 429. Default: no limit",
        metavar="N",
    ),
    Setting(
        "lenient",
        "bool",
        False,
        "leave out parameters that are unknown or not supported, and say so in x-octavo-ignored",
    ),
    Setting(
        "stall_timeout",
        "float",
        120.0,
        "/health turns red when the engine has work and finished no step for so long; 0: never",
        metavar="SECONDS",
        field="stall_seconds",
    ),
    Setting(
        "shutdown_timeout",
        "float",
        5.0,
        "how long running requests may go on after SIGTERM or Ctrl-C",
        metavar="SECONDS",
        field="shutdown_seconds",
    ),
    Setting(
        "trust_request_chat_template",
        "bool",
        False,
        "let requests bring their own chat template",
    ),
    Setting(
        "tool_call_parser",
        "str",
        "auto",
        "how the model writes calls of tools: hermes, llama3, mistral, pythonic, deepseek, a plug-in's; "
        "auto: as its chat template or vocabulary says; none",
        metavar="NAME",
    ),
    Setting(
        "fallback_tool_prompt",
        "bool",
        False,
        "tell of tools in the system message when the model's chat template takes none",
    ),
    Setting(
        "reasoning_parser",
        "str",
        "auto",
        "how the model writes its reasoning: deepseek_r1, qwen3, a plug-in's; auto; none",
        metavar="NAME",
    ),
)
# Variables that are no settings: where the file is, and whether mistakes show a traceback.
_OTHER_VARIABLES = ("config", "debug")


def resolve(
    flags: Mapping[str, Any],
    settings: tuple[Setting, ...],
    *,
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Value]:
    """Every setting's value and origin.

    flags: what the command line gave, by name. config_file: --config; without it OCTAVO_CONFIG.

    Raises:
        ConfigError: an unknown key or variable (with the nearest known), an unreadable file, a
            value of the wrong kind.
    """
    known = {setting.name: setting for setting in (*ENGINE, *SERVER)}
    variables = environment(environ)
    for name in variables:
        if name not in known and name not in _OTHER_VARIABLES:
            raise ConfigError(_unknown(PREFIX + name.upper(), name, known, prefix=PREFIX))
    path = config_file or variables.get("config")
    file = read_file(Path(path).expanduser()) if path else {}
    result = {}
    for setting in settings:
        name = setting.name
        if name in flags:
            result[name] = Value(flags[name], setting.flag)
        elif name in variables:
            origin = setting.variable
            result[name] = Value(_parsed(setting, variables[name], origin), origin)
        elif name in file:
            result[name] = Value(_checked(setting, file[name], str(path)), str(path))
        else:
            result[name] = Value(setting.default, "default")
        _check_choice(setting, result[name])
    return result


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a YAML, TOML or JSON file, with `-` and `_` alike.

    Raises:
        ConfigError: it cannot be read, holds no keys, or one that is not known.
    """
    known = [setting.name for setting in (*ENGINE, *SERVER)]
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    value = _parse_text(path, text)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold keys and values, as `max_model_len: 4096`")
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: {_unknown(str(key), name, known)}")
        if name in result:
            raise ConfigError(f"{path} has {name} twice, once as {key}")
        if item is not None:
            result[name] = item
    return result


def _parse_text(path: Path, text: str) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".toml":
        import tomllib

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is no valid TOML: {error}") from None
    if suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"--config {path}: its name must end in .yaml, .yml, .toml or .json")
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no valid YAML: {error}") from None
    return {} if value is None else value


def _unknown(shown: str, name: str, known: Any, prefix: str = "") -> str:
    instead = elsewhere(name)
    if instead is not None:
        return f"{shown} is not an option here: {instead}"
    close = nearest(name, known)
    if prefix and close:
        close = nearest(shown, [prefix + item.upper() for item in known])
    hint = close or "; see octavo serve --help for all"
    return f"unknown {'variable' if prefix else 'key'} {shown!r}{hint}"


_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def split(text: str) -> tuple[str, ...]:
    """The items between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parsed(setting: Setting, text: str, origin: str) -> Any:
    """A value written as text."""
    kind = setting.kind
    try:
        if kind == "bool":
            return _WORDS[text.strip().lower()]
        if kind in ("strs", "list"):
            return split(text)
        if kind == "size":
            return parse_bytes(text)
        if kind == "json":
            return json_object(text)
        return {"int": int, "float": float, "str": str}[kind](text)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    except (KeyError, ValueError):
        raise ConfigError(f"{origin} must be {_KINDS[kind]}, got {text!r}") from None


def json_object(text: str) -> dict[str, Any]:
    """An object written as JSON. Raises ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


_KINDS = {
    "json": 'a JSON object, as {"method": "ngram"}',
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "size": "bytes, or a size as 2G",
    "strs": "text or a list of texts",
    "list": "text or a list of texts",
}


def _checked(setting: Setting, value: Any, path: str) -> Any:
    """A value that a file gave, which has a type of its own."""
    origin, kind = f"{path}: {setting.name}", setting.kind
    if kind in ("size", "json") and isinstance(value, str):
        return _parsed(setting, value, origin)
    if (
        kind in ("strs", "list")
        and isinstance(value, list)
        and all(isinstance(v, str) for v in value)
    ):
        return tuple(value)
    if kind in ("strs", "list") and isinstance(value, str):
        return (value,)
    wanted: dict[str, tuple[type, ...]] = {
        "bool": (bool,),
        "int": (int,),
        "size": (int,),
        "float": (int, float),
        "str": (str,),
        "strs": (),
        "list": (),
        "json": (dict,),
    }
    if not isinstance(value, wanted[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"{origin} must be {_KINDS[kind]}, got {value!r}")
    return float(value) if kind == "float" and isinstance(value, int) else value


def _check_choice(setting: Setting, value: Value) -> None:
    if setting.choices and value.value not in setting.choices:
        raise ConfigError(
            f"{value.origin}: {setting.name} must be one of {', '.join(setting.choices)}, "
            f"got {value.value!r}{nearest(str(value.value), setting.choices)}"
        )


def engine_values(values: Mapping[str, Value]) -> EngineConfig:
    """The frozen engine configuration. What is wrong with a value names where it came from.

    Raises:
        ConfigError: values that cannot be used.
    """
    names = [setting.name for setting in ENGINE]
    try:
        return EngineConfig.from_kwargs(**{name: values[name].value for name in names})
    except ConfigError as error:
        asked = [n for n in names if n in str(error).split() and values[n].origin != "default"]
        origins = dict.fromkeys(f"{n} from {values[n].origin}" for n in asked)
        note = f" ({', '.join(origins)})" if origins else ""
        raise ConfigError(f"{error}{note}") from None


def server_values(values: Mapping[str, Value]) -> dict[str, Any]:
    """The fields of `ServerOptions`."""
    return {setting.field or setting.name: values[setting.name].value for setting in SERVER}


def shown(values: Mapping[str, Value]) -> str:
    """The configuration as a file that --config takes, each line with its origin.

    What has no value and what must stay secret stands there as a comment.
    """
    secret = {setting.name for setting in SERVER if setting.secret}
    lines = []
    for name, entry in values.items():
        value = entry.value
        if value is None or value == ():
            line = f"# {name}:"
        elif name in secret:
            line = f"# {name}: (not shown)"
        else:
            value = list(value) if isinstance(value, tuple) else value
            line = f"{name}: {json.dumps(value, ensure_ascii=False)}"
        lines.append(f"{line:<44}  # {entry.origin}")
    return "\n".join(lines)
