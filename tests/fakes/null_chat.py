"""`python null_chat.py [system]`: the real chat around the null engine."""

import sys
from pathlib import Path

import null_engine

from octavo.core.config import EngineConfig
from octavo.core.entry.llm import LLM
from octavo.core.entry.terminal.partners import LocalPartner
from octavo.core.entry.terminal.talk import Chat

config = EngineConfig(model="null")
llm = LLM.from_parts(config, null_engine.load(config), null_engine.NullEngine(config))
history = Path(sys.argv[2]) if len(sys.argv) > 2 else None
try:
    Chat(LocalPartner(llm), system=(sys.argv[1:] or [None])[0], history=history).run()
except KeyboardInterrupt:
    sys.exit(130)
