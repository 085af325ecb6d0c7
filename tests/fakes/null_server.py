"""`python null_server.py PORT [served name …]`: the real server around an engine of the tests' own.

NULL_ENGINE_OPTIONS: JSON of `ServerOptions`. NULL_ENGINE_ENGINE: the module that has the engine.
"""

import importlib
import json
import os
import sys

from octavo.core.config import EngineConfig
from octavo.core.entry.engine_client import EngineDeadError
from octavo.core.entry.server.run import ServerOptions, serve

engine = os.environ.get("NULL_ENGINE_ENGINE", "null_engine")
options = json.loads(os.environ.get("NULL_ENGINE_OPTIONS", "{}"))
options.setdefault("shutdown_seconds", float(os.environ.get("NULL_ENGINE_SHUTDOWN", "1")))

try:
    serve(
        EngineConfig(model=os.environ.get("NULL_ENGINE_MODEL", "null"), max_model_len=4096),
        ServerOptions(port=int(sys.argv[1]), served_model_name=sys.argv[2:], **options),
        factory=f"{engine}:build",
        loader=importlib.import_module(engine).load,
    )
except EngineDeadError as error:  # as `octavo serve` does
    print(f"octavo: error: {error}", file=sys.stderr)
    sys.exit(1)
