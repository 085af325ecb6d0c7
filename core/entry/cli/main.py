"""`octavo`: serve, generate, look at devices and models.

argparse, because it is there and starts in milliseconds; each command imports what it needs only
when it runs.
"""

from __future__ import annotations

import argparse
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
    "bench": "measure throughput",
}


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
    parser = _Parser(
        prog="octavo",
        description="Run and serve language models on the hardware you have.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"octavo {octavo.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    for name, summary in _COMMANDS.items():
        module = f"octavo.core.entry.cli.{name}"
        if find_spec(module) is None:
            continue
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == chosen:  # the others' options are not asked for
            import_module(module).add_arguments(command)
            command.set_defaults(run=import_module(module).run)
    _run(parser.parse_args([_dashed(a) for a in arguments]))


def _run(options: argparse.Namespace) -> None:
    from octavo.core.entry.engine_client import EngineDeadError
    from octavo.core.types import ParamError

    try:
        options.run(options)
    except (ConfigError, ModelError, ParamError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever reads our output has seen enough
        sys.stderr.close()
        sys.exit(1)
    except (CommandFailed, EngineDeadError) as error:
        _fail(str(error), 1)


def _dashed(argument: str) -> str:
    """`--max_model_len=5` -> `--max-model-len=5`: both spellings are common."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


if __name__ == "__main__":
    main()
