"""`octavo serve`."""

from __future__ import annotations

import argparse

from octavo.core.entry.cli.options import add_engine_options, engine_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    server.add_argument("--port", type=int, default=8000, help="port to listen on (8000)")
    server.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names in the API instead of the model's own; the first stands in answers",
    )
    server.add_argument("--api-key", help="key that clients must send (Authorization: Bearer)")
    server.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error")
    )
    server.add_argument(
        "--shutdown-timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM or Ctrl-C (5)",
    )
    server.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring their own chat template",
    )
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Serves until told to stop."""
    config = engine_config(options)
    from octavo.core.entry.server.run import ServerOptions, serve

    serve(
        config,
        ServerOptions(
            host=options.host,
            port=options.port,
            served_model_name=options.served_model_name,
            api_key=options.api_key,
            log_level=options.log_level,
            shutdown_seconds=options.shutdown_timeout,
            trust_request_chat_template=options.trust_request_chat_template,
        ),
    )
