"""`octavo`: serve, generate, look at devices and models.

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
from typing import NoReturn

import octavo
from octavo.core.config import ConfigError, nearest
from octavo.core.entry.cli.failure import CommandFailed
from octavo.core.loading.errors import ModelError

_COMMANDS = {
    "serve": "an OpenAI-compatible HTTP server",
    "generate": "complete prompts on the command line",
    "devices": "backends, and the devices they find",
    "models": "models kept on this machine",
    "bench": "measure throughput, latency, serving, start-up and KV cache use",
    "backend": "check a backend against the contract",
}
_HERE = "octavo.core.entry.cli"


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line, with the nearest thing that exists."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flag = unknown.split()[0].partition("=")[0]
            message = f"unknown option {flag!r}{nearest(flag, self._option_string_actions)}"
        _fail(f"{message} (see {self.prog} --help)")


def _fail(message: str, code: int = 2) -> NoReturn:
    sys.stdout.flush()
    print(f"octavo: error: {message}", file=sys.stderr)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. Exit codes: 0, 1 failure, 2 a mistake in what was asked, 130 Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {n: s for n, s in _COMMANDS.items() if find_spec(f"{_HERE}.{n}") is not None}
    # Told apart by hand: each command has a parser of its own, made only when it is called.
    if arguments and arguments[0] in commands:
        _run(arguments[0], arguments[1:])
        return
    parser = _Parser(
        prog="octavo",
        usage="octavo COMMAND …",
        description="Run and serve language models on the hardware you have.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<10} {summary}" for name, summary in commands.items())
        + "\n\noctavo COMMAND --help tells the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"octavo {octavo.__version__}")
    _, rest = parser.parse_known_args(arguments)
    if not rest:
        parser.error("no command given")
    parser.error(f"no command {rest[0]!r}{nearest(rest[0], commands)}")


def _run(command: str, arguments: Sequence[str]) -> None:
    summary = _COMMANDS[command]
    parser = _Parser(prog=f"octavo {command}", description=summary, allow_abbrev=False)
    module = import_module(f"{_HERE}.{command}")
    module.add_arguments(parser)
    options = parser.parse_args([_dashed(argument) for argument in arguments])
    try:
        module.run(options)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever reads our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        _fail(str(error), code)


def _exit_code(error: Exception) -> int | None:
    """2 for a mistake in what was asked, 1 for a failure in what was done, None for a bug."""
    from octavo.core.entry.engine_client import EngineDeadError
    from octavo.core.types import ParamError

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
