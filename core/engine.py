"""The step loop: schedule, run, commit. Token ids in, token ids out; one thread at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from octavo.core.params import ParamError, RequestRefused
from octavo.core.pooling import EmbeddingInfo, Task
from octavo.core.scheduler import AbortTarget, Scheduler
from octavo.core.stats import SchedulerStats
from octavo.core.structured import Grammars
from octavo.core.types import Request, SequenceUpdate, StepPlan, StepResult

if TYPE_CHECKING:
    from octavo.core.beam_text import BeamTexts

logger = logging.getLogger(__name__)

EngineStats = SchedulerStats


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is running, as the start-up banner and the API tell it. `phases` maps each
    start-up phase to seconds; `notes` holds what the engine chose by itself and why; `capabilities`
    are the backend's, as data. `host_blocks` of `host_bytes` are the pool for blocks in host memory."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    device_reason: str
    backend: str
    dtype: str
    quantization: str | None = None
    kv_dtype: str
    block_size: int
    num_kv_blocks: int
    kv_bytes: int
    host_blocks: int = 0
    host_bytes: int = 0
    preemption_mode: str = "recompute"
    weight_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int = 20
    phases: Mapping[str, float] = {}
    notes: tuple[str, ...] = ()
    capabilities: Mapping[str, Any] = {}
    tasks: tuple[Task, ...] = ("generate",)
    embedding: EmbeddingInfo | None = None  # how prompts are embedded, where that is a task
    not_a_task: str = ""  # why the other one is none

    @property
    def numbers(self) -> str:
        """The weights' numbers in words: the dtype, and the scheme in front of it if there is one."""
        return f"{self.quantization} over {self.dtype}" if self.quantization else self.dtype


class StepRunner(Protocol):
    """What computes a step. `compilations`: programs that its device has built so far."""

    @property
    def compilations(self) -> int: ...

    def execute(self, step: StepPlan) -> StepResult: ...

    def recover(self) -> bool:
        """After a step that failed: whether the KV cache was lost, and is a new and empty one now."""
        ...

    def close(self) -> None: ...


_PATIENCE = 0.05  # seconds that a step without anything to run waits for what requests need


class EngineStuck(RuntimeError):
    """Requests wait, yet no step can be planned: a fault of the scheduler, never of a request."""


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


class Engine:
    """Runs requests to their end.

    Args:
        scheduler: owns sequences and blocks.
        runner: computes a planned step.
        info: what is being run.
        grammars: compiles those of structured output; None: such requests are refused.
        texts: begins the texts of beams that have stop strings; None: such requests are refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        info: ModelInfo,
        grammars: Grammars | None = None,
        texts: BeamTexts | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.info = info
        self._runner = runner
        self._grammars, self._texts = grammars, texts
        self.host_seconds = 0.0  # spent outside the runner, since the start
        self.runner_seconds = 0.0

    def add(self, request: Request) -> None:
        """Queues a request; its first step may be the next one.

        Raises:
            ParamError: a parameter this model cannot take; RequestRefused: it could never run here.
        """
        params, vocab = request.params, self.info.vocab_size
        task: Task = "generate" if request.pooling is None else "embed"
        if task not in self.info.tasks:
            raise ParamError("model", self.info.not_a_task)
        params.check_vocabulary(vocab)
        for token in request.prompt_token_ids:
            if (type(token) is not int and not _whole(token)) or not 0 <= token < vocab:
                raise ParamError(
                    "prompt",
                    f"prompt has token id {token!r}; this model's ids are 0 to {vocab - 1}",
                )
        limit = self.info.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and limit >= 0 and not 0 <= asked <= limit:
                raise RequestRefused(
                    name, f"{name}={asked} exceeds the engine's limit of {limit} (--max-logprobs)"
                )
        structured, needs = params.structured_outputs, None
        if structured is not None:
            if self._grammars is None:
                raise ParamError(
                    "structured_outputs", "this engine has no tokenizer to follow a grammar with"
                )
            needs = self._grammars.compile(structured)
        if not params.use_beam_search or not params.stops:
            self.scheduler.add(request, needs)
        elif self._texts is None:
            raise ParamError("stop", "this engine has no tokenizer to look for stop strings with")
        else:
            begin = partial(self._texts.begin, request)
            self.scheduler.add(request, self._texts.ready(needs), begin)

    def abort(self, targets: Iterable[AbortTarget]) -> list[SequenceUpdate]:
        """Ends requests (by id), or samples that hit a stop string (by (id, index)), and frees their
        blocks at once.

        Returns their final updates. Unknown targets are ignored: they may just have finished.
        """
        return self.scheduler.abort(targets)

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    def step(self) -> list[SequenceUpdate]:
        """Runs one step and returns what it brought. A step that fails ends its own requests with
        finish reason "error"; the others go on, from their beginning if the KV cache was lost.

        Raises:
            EngineStuck: unfinished requests, but no step to run.
        """
        started = time.perf_counter()
        early = self.scheduler.release()
        plan = self.scheduler.schedule()
        if plan is None:
            if early or self.scheduler.wait_for_needs(_PATIENCE):
                return early
            if self.scheduler.has_unfinished():
                raise EngineStuck(f"no step can be planned: {self.scheduler.stats()}")
            return []
        planned = time.perf_counter()
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            message = f"the step failed: {type(error).__name__}: {error}"
            updates = self.scheduler.fail(plan, message)
            if self._runner.recover():
                logger.error(
                    "its KV cache was lost: %d sequences begin again", self.scheduler.restart()
                )
            return early + updates
        ran = time.perf_counter()
        updates = self.scheduler.commit(plan, result)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.observe(plan, ran - planned)
        if self.scheduler.swap is not None:
            self.scheduler.swap.observe(plan, ran - planned)
        self.runner_seconds += ran - planned
        self.host_seconds += (planned - started) + (time.perf_counter() - ran)
        return early + updates if early else updates

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        return msgspec.structs.replace(stats, compilations=self._runner.compilations)

    def shutdown(self) -> None:
        """Ends every request and lets the weights go."""
        self.scheduler.abort([s.request.id for s in list(self.scheduler.sequences())])
        if self._grammars is not None:
            self._grammars.close()
        if self._texts is not None:
            self._texts.close()
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.close()
        self._runner.close()
