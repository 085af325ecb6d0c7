"""`python null_server.py PORT [served name …]`: the real server around the null engine."""

import os
import sys

import null_engine

from octavo.core.config import EngineConfig
from octavo.core.entry.server.run import ServerOptions, serve

serve(
    EngineConfig(model=os.environ.get("NULL_ENGINE_MODEL", "null"), max_model_len=4096),
    ServerOptions(
        port=int(sys.argv[1]),
        served_model_name=sys.argv[2:],
        api_key=os.environ.get("NULL_ENGINE_KEY"),
        shutdown_seconds=float(os.environ.get("NULL_ENGINE_SHUTDOWN", "1")),
    ),
    factory="null_engine:build",
    loader=null_engine.load,
)
