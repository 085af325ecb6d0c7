"""`octavo`: serve, chat, generate, look at devices and models.

argparse, because it is there and starts in milliseconds; each command imports what it needs only
when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

import octavo
from octavo.core.config import ConfigError, elsewhere, environment, nearest
from octavo.core.entry.cli.failure import CommandFailed
from octavo.core.loading.errors import ModelError

COMMANDS = {
    "serve": "an OpenAI-compatible HTTP server",
    "chat": "talk to a model, here or behind a URL",
    "generate": "complete prompts: from arguments, files or OpenAI batches",
    "plan": "does a model fit, and how much can run at once",
    "devices": "backends, and the devices they find",
    "models": "list, remove and export models kept on this machine",
    "bench": "measure throughput, latency, serving, scheduling, start-up and KV cache use",
    "backend": "begin a backend, or check one against the contract",
    "completion": "completion for bash, zsh and fish",
}
_EXIT_CODES = """exit codes:
  0    done
  1    failed, though it was asked rightly
  2    a mistake in what was asked: option, configuration, model
  130  ended by Ctrl-C"""
_HERE = "octavo.core.entry.cli"


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line, with the nearest thing that exists."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flag = unknown.split()[0].partition("=")[0]
            message = self._unknown(flag)
        _fail(f"{message} (see {self.prog} --help)")

    def _unknown(self, flag: str) -> str:
        name = flag.removeprefix("--").replace("-", "_")
        positive = name.removeprefix("no_")
        instead = elsewhere(name) or elsewhere(positive)
        if flag.startswith("--") and instead is not None:
            return f"{flag} is not an option here: {instead}"
        if not flag.startswith("-"):
            return f"unexpected argument {flag!r}"
        return f"unknown option {flag!r}{nearest(flag, _options(self))}"


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a parser and its sub-parsers."""
    known = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            known.update(*map(_options, action.choices.values()))
    return known


def _fail(message: str, code: int = 2) -> NoReturn:
    sys.stdout.flush()
    print(f"octavo: error: {message}", file=sys.stderr)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. Exit codes: 0, 1 failure, 2 a mistake in what was asked, 130 Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = available()
    # Told apart by hand: each command has a parser of its own, made only when it is called.
    if arguments and arguments[0] in commands:
        _run(arguments[0], arguments[1:])
        return
    parser = _Parser(
        prog="octavo",
        usage="octavo COMMAND …",
        description="Run and serve language models on the hardware you have.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<10}  {summary}" for name, summary in commands.items())
        + f"\n\noctavo COMMAND --help tells the options of a command.\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"octavo {octavo.__version__}")
    _, rest = parser.parse_known_args(arguments)
    if not rest:
        parser.error("no command given")
    parser.error(f"no command {rest[0]!r}{nearest(rest[0], commands)}")


def available() -> dict[str, str]:
    """The commands of this installation, with what each does."""
    return {n: s for n, s in COMMANDS.items() if find_spec(f"{_HERE}.{n}") is not None}


def command_parser(command: str) -> tuple[argparse.ArgumentParser, ModuleType]:
    """A command's parser, and the module that runs it."""
    parser = _Parser(prog=f"octavo {command}", description=COMMANDS[command], allow_abbrev=False)
    module = import_module(f"{_HERE}.{command}")
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    parser.usage = _usage(parser)
    return parser, module


def _usage(parser: argparse.ArgumentParser) -> str:
    """One line: a list of forty flags before their explanations helps nobody."""
    words = [parser.prog, "[options]"]
    for action in parser._get_positional_actions():
        name = str(action.metavar or action.dest)
        if isinstance(action, argparse._SubParsersAction):
            name += " …"
        words.append(name if action.required else f"[{name}]")
    return " ".join(words)


def _run(command: str, arguments: Sequence[str]) -> None:
    parser, module = command_parser(command)
    options = parser.parse_args([_dashed(argument) for argument in arguments])
    try:
        if getattr(options, "show_config", False):
            _show_config(options, module)
        else:
            module.run(options)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever reads our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        code = _exit_code(error)
        # A mistake needs no traceback; a bug does, and so does who looks for one.
        if code is None or options.debug or "debug" in environment():
            raise
        _fail(str(error), code)


def _show_config(options: argparse.Namespace, module: ModuleType) -> None:
    from octavo.core.entry.cli.options import settings_of
    from octavo.core.entry.cli.settings import ENGINE, engine_values, shown

    values = settings_of(options, getattr(module, "SETTINGS", ENGINE))
    engine_values(values)  # what is shown can also be used
    print(shown(values))


def _exit_code(error: Exception) -> int | None:
    """2 for a mistake in what was asked, 1 for a failure in what was done, None for a bug."""
    from octavo.core.entry.engine_client import EngineDeadError
    from octavo.core.params import ParamError

    if isinstance(error, (ConfigError, ModelError, ParamError)):
        return 2
    return 1 if isinstance(error, (CommandFailed, EngineDeadError)) else None


def _dashed(argument: str) -> str:
    """`--max_model_len=5` -> `--max-model-len=5`: both spellings are common."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


if __name__ == "__main__":
    main()
