"""`octavo chat`: answers on standard output, everything else on standard error."""

from __future__ import annotations

import argparse
from dataclasses import replace

from octavo.core.config import ConfigError, prepare_thread_environment, state_dir
from octavo.core.entry.cli.options import add_engine_options, add_options, settings_of
from octavo.core.entry.cli.sampling import CHAT, add_sampling_options, sampling_values
from octavo.core.entry.cli.settings import ENGINE, SERVER, engine_values

_KEY = replace(
    next(setting for setting in SERVER if setting.name == "api_key"),
    help="the server's key (with --url); better in OCTAVO_API_KEY, where no process list shows it",
)
SETTINGS = (*ENGINE, _KEY)
"""What --show-config shows for this command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    chat = parser.add_argument_group("chat")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument(
        "--url",
        metavar="URL",
        help="talk to an OpenAI-compatible server, as http://127.0.0.1:8000/v1; MODEL is then its "
        "name for the model (default: the first it lists)",
    )
    add_options(chat, (_KEY,))
    chat.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep typed lines for the next time (default: True)",
    )
    add_sampling_options(parser, CHAT)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Talks until the input ends."""
    values = settings_of(options, SETTINGS)
    sampling = sampling_values(options)
    from octavo.core.entry.terminal.partners import LocalPartner, RemotePartner
    from octavo.core.entry.terminal.talk import Chat
    from octavo.core.params import SamplingParams

    SamplingParams(**sampling)  # a mistake is told before a model is loaded
    history = state_dir() / "chat_history" if options.history else None
    if options.url is not None:
        given = [s.flag for s in ENGINE if s.name != "model" and s.name in vars(options)]
        if given:
            raise ConfigError(
                f"{', '.join(given)} would configure an engine here, and --url uses one elsewhere: "
                "leave out one or the other"
            )
        asked = options.MODEL or getattr(options, "model", None)
        remote = RemotePartner(options.url, next(iter(values["api_key"].value), None), asked)
        Chat(remote, system=options.system, values=sampling, history=history).run()
        return
    if values["api_key"].origin == _KEY.flag:
        raise ConfigError("--api-key needs --url")
    config = engine_values(values)
    prepare_thread_environment()
    from octavo.core.entry.llm import LLM

    with LLM.from_config(config) as llm:
        local = LocalPartner(llm)
        Chat(local, system=options.system, values=sampling, history=history).run()
