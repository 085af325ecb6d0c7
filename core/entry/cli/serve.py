"""`octavo serve`."""

from __future__ import annotations

import argparse

from octavo.core.entry.cli.options import add_engine_options, add_server_options, settings_of
from octavo.core.entry.cli.settings import ENGINE, SERVER, engine_values, server_values
from octavo.core.entry.engine_spawn import spawned_ahead

SETTINGS = (*ENGINE, *SERVER)
"""What --show-config shows for this command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_server_options(parser)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Serves until told to stop."""
    values = settings_of(options, SETTINGS)
    config, server = engine_values(values), server_values(values)
    # Before the server's modules are imported: on another core the engine imports torch meanwhile.
    with spawned_ahead() as spawned:
        from octavo.core.entry.server.run import ServerOptions, serve

        serve(config, ServerOptions(**server), spawned=spawned)
