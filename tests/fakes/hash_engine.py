"""The real scheduler and engine around a model that is a hash function, for served processes.

Its plans and its KV cache are audited at every step (tests/core/support.py), and its blocks whenever
statistics are asked for: a fault ends the engine. The pool is tiny. HASH_ENGINE_STEP_SECONDS makes
each step slow.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from null_engine import EOS, FIRST_BYTE, VOCAB, byte_tokenizer
from support import NullRunner, model_info

from octavo.core.admission import SchedulerLimits
from octavo.core.blocks import BlockManager
from octavo.core.config import EngineConfig
from octavo.core.engine import Engine, EngineStats
from octavo.core.entry.front import Front
from octavo.core.scheduler import Scheduler
from octavo.core.types import StepPlan, StepResult

BLOCKS = 40  # the null block and 39 of 16 tokens
CONTEXT = 512


class _ByteRunner(NullRunner):
    """Puts out letters, and now and then EOS."""

    pause = float(os.environ.get("HASH_ENGINE_STEP_SECONDS", "0"))

    def execute(self, step: StepPlan) -> StepResult:
        time.sleep(self.pause)
        return super().execute(step)

    def _token(self, sequence: Any, sample: int, last: int, ahead: int = 0) -> int:
        token = super()._token(sequence, sample, last, ahead)
        return EOS if token % 60 == 0 else FIRST_BYTE + 97 + token % 26


class _AuditedEngine(Engine):
    def stats(self) -> EngineStats:
        self.scheduler.check()
        return super().stats()


def build(config: EngineConfig, progress: Any = None, **_: Any) -> Engine:
    """What the engine process calls."""
    limits = SchedulerLimits(
        max_num_seqs=12, max_num_batched_tokens=64, max_model_len=CONTEXT, max_logits_rows=80
    )
    blocks = BlockManager(BLOCKS, 16, True)
    info = model_info(
        CONTEXT, vocab_size=VOCAB, eos_token_ids=(EOS,), max_num_seqs=12, num_kv_blocks=BLOCKS
    )
    return _AuditedEngine(Scheduler(blocks, limits), _ByteRunner(blocks, limits), info)


def load(config: EngineConfig, progress: Any = None) -> Front:
    """What the front calls."""
    return Front("hash", byte_tokenizer(), {})
