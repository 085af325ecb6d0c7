"""`AsyncLLM`: many concurrent callers, one engine in a process of its own.

Tokenisation, detokenisation and everything else that is Python's alone happen here, so that the
engine process does nothing but steps. This process imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import msgspec

from octavo.core.config import DEFAULT_MODEL, EngineConfig
from octavo.core.engine import ModelInfo
from octavo.core.entry import messages
from octavo.core.entry.embedding import Embedder, EmbeddingRequestOutput, PoolingParams
from octavo.core.entry.engine_client import EngineClient, EngineDeadError
from octavo.core.entry.engine_spawn import DEFAULT_FACTORY, Spawned
from octavo.core.entry.front import Front, load_front, load_progress
from octavo.core.entry.inputs import (
    Conversation,
    InputProcessor,
    Prompt,
    PromptInput,
    sampling_defaults,
)
from octavo.core.entry.pulse import Pulse
from octavo.core.loading.progress import Progress
from octavo.core.loading.tokenizer import Tokenizer
from octavo.core.output import OutputProcessor, SampleId, merge_outputs
from octavo.core.params import ParamError, RequestRefused, SamplingParams
from octavo.core.request_stats import RequestStats
from octavo.core.structured import check as check_grammar
from octavo.core.types import Request, RequestOutput

__all__ = ["AsyncLLM", "EngineDeadError"]

log = logging.getLogger("octavo")

LONG_PROMPT_CHARACTERS = 8192
"""Text from this length on is tokenised in a thread: it would hold up the event loop for more than
about a millisecond."""

Loader = Callable[[EngineConfig, Progress | None], Front]


class _Stream:
    """Outputs on their way to one caller. What it has not fetched in time is merged."""

    __slots__ = ("_error", "_outputs", "_waiter", "external_id", "kind")

    def __init__(self, external_id: str, params: SamplingParams) -> None:
        self.external_id = external_id
        self.kind = params.output_kind
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return merge_outputs(outputs, self.kind)


class AsyncLLM:
    """A model served to concurrent callers on one event loop.

    `await start()` (or `async with`) before use, `await shutdown()` after it. When the engine
    process dies, every open request raises `EngineDeadError`, and so does every later one.

    Args:
        model: folder, .gguf file, hub id or pypi:<package>.
        options: the fields of `EngineConfig`.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        self._init(EngineConfig.from_kwargs(model=model, **options))

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        factory: str = DEFAULT_FACTORY,
        loader: Loader = load_front,
        progress: Progress | None = None,
        spawned: Spawned | None = None,
    ) -> AsyncLLM:
        """As the constructor. `factory` names what builds the engine in its process, `loader` what
        finds the files and the tokenizer here; `spawned` is that process if it was started before."""
        llm = cls.__new__(cls)
        llm._init(config, factory, loader, progress, spawned)
        return llm

    def _init(
        self,
        config: EngineConfig,
        factory: str = DEFAULT_FACTORY,
        loader: Loader = load_front,
        progress: Progress | None = None,
        spawned: Spawned | None = None,
    ) -> None:
        self.config = config
        self._loader = loader
        self._progress = progress or load_progress(config)
        self._client = EngineClient(self, factory, spawned)
        self.pulse = Pulse()
        self.ended = asyncio.Event()  # the engine process has, and not because it was told to
        self._streams: dict[str, _Stream] = {}
        self._stats: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tokens = itertools.count()
        self._front: Front | None = None
        self._info: ModelInfo | None = None
        self._input: InputProcessor | None = None
        self._embedder: Embedder | None = None
        self._output: OutputProcessor | None = None

    async def start(self) -> None:
        """Loads the model; returns when requests can be taken.

        Raises:
            ConfigError, ModelError: what was asked cannot be used.
            EngineDeadError: the engine process ended while loading.
        """
        await self._client.launch()
        try:
            front = await asyncio.to_thread(self._loader, self.config, self._progress)
            info = await self._client.load(asdict(self.config), self._progress)
        except BaseException:
            await self._client.close()
            raise
        self._front, self._info = front, info
        self._output = OutputProcessor(front.tokenizer)
        self._input = InputProcessor(
            front.tokenizer,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            max_logprobs=self.config.max_logprobs,
            defaults=sampling_defaults(front.generation_config),
        )
        self._embedder = Embedder(self._input, info)

    async def shutdown(self) -> None:
        """Ends the engine process; open requests raise `EngineDeadError`. May be called twice."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()

    # Facts.

    @property
    def is_running(self) -> bool:
        """Loaded, and the engine process is alive."""
        return self._info is not None and self._client.death is None

    def check_health(self) -> None:
        """Returns when requests can be taken.

        Raises:
            EngineDeadError: they cannot, and why.
        """
        if self._client.death is not None:
            raise self._client.death
        if self._info is None:
            raise EngineDeadError("the model is still loading")

    @property
    def info(self) -> ModelInfo:
        """The engine's facts: context length, device and why, dtype, KV blocks, start-up phases."""
        assert self._info is not None, "await start() first"
        return self._info

    @property
    def inputs(self) -> InputProcessor:
        """What turns text and conversations into prompts for this model."""
        assert self._input is not None, "await start() first"
        return self._input

    @property
    def embedder(self) -> Embedder:
        """What turns prompts into requests for embeddings."""
        assert self._embedder is not None, "await start() first"
        return self._embedder

    @property
    def model_name(self) -> str:
        """What a server calls the model unless told otherwise."""
        assert self._front is not None, "await start() first"
        return self._front.name

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        """Open requests of which nothing came yet."""
        return self._output.num_unbegun if self._output is not None else 0

    @property
    def engine_pid(self) -> int | None:
        """The engine process's id."""
        return self._client.pid

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.inputs.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (its generation_config) over `SamplingParams`' defaults."""
        return self.inputs.default_params()

    @property
    def request_stats(self) -> RequestStats:
        """Requests, samples and tokens since the start."""
        assert self._output is not None, "await start() first"
        return self._output.stats

    async def stats(self) -> dict[str, Any]:
        """`EngineStats` as a dict, asked of the engine between two of its steps."""
        token = next(self._tokens)
        self._client.send(messages.AskStats(token))
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._stats[token] = future
        try:
            return await future
        finally:
            self._stats.pop(token, None)

    async def watch(self, seconds: float) -> None:
        """Asks the engine every so many seconds how it is, and never ends. The answers go to `pulse`."""
        while True:
            await asyncio.sleep(seconds)
            with contextlib.suppress(EngineDeadError, asyncio.TimeoutError):
                await asyncio.wait_for(self.stats(), seconds)

    # Requests.

    async def tokenize(self, prompt: PromptInput, *, add_special_tokens: bool = True) -> Prompt:
        """`InputProcessor.tokenize`, in a thread when the text is long."""
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(text, str) and len(text) >= LONG_PROMPT_CHARACTERS:
            return await asyncio.to_thread(
                self.inputs.tokenize, prompt, add_special_tokens=add_special_tokens
            )
        return self.inputs.tokenize(prompt, add_special_tokens=add_special_tokens)

    async def render_chat(self, messages: Conversation, **options: Any) -> Prompt:
        """`InputProcessor.chat`, in a thread when the conversation is long."""
        length = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str))
        if length >= LONG_PROMPT_CHARACTERS:
            return await asyncio.to_thread(self.inputs.chat, messages, **options)
        return self.inputs.chat(messages, **options)

    async def generate(
        self,
        prompt: PromptInput | Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        shown_special: Collection[int] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes one prompt, yielding what `sampling_params.output_kind` asks for.

        `request_id` is the caller's name for the request: outputs carry it and `abort` takes it; it
        need not be unique. Leaving the loop early, or cancelling the task, aborts the request.
        shown_special: ids of special tokens that are text even with `skip_special_tokens`.

        Raises:
            ParamError: a prompt or parameter that cannot be used.
            EngineDeadError: the engine process has ended.
        """
        ready = prompt if isinstance(prompt, Prompt) else await self.tokenize(prompt)
        params = sampling_params or self.get_default_sampling_params()
        if params.structured_outputs is not None:  # may take seconds: not on the event loop
            await asyncio.to_thread(check_grammar, params.structured_outputs)
        request = self.inputs.request(ready, params, priority=priority, cache_salt=cache_salt)
        if shown_special and params.use_beam_search and params.stops:
            request = msgspec.structs.replace(request, shown_special=tuple(shown_special))
        stream = self._submit(request, ready.text, request_id, shown_special)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            if self._streams.pop(request.id, None) is not None:
                self._drop(request.id)

    async def embed(
        self,
        prompt: PromptInput | Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Embeds one prompt, pooled as the checkpoint says. Cancelling the task aborts the request.

        Raises:
            ParamError: a prompt or parameter that cannot be used, or a model that embeds nothing.
            EmbeddingFailed: its step failed, or somebody aborted it.
            EngineDeadError: the engine process has ended.
        """
        ready = self.embedder.prompt(prompt, pooling_params)
        request = self.embedder.request(
            ready, pooling_params, priority=priority, cache_salt=cache_salt
        )
        stream = self._submit(request, ready.text, request_id, ())
        try:
            return EmbeddingRequestOutput.of(await stream.get())
        finally:
            if self._streams.pop(request.id, None) is not None:
                self._drop(request.id)

    def _submit(
        self,
        request: Request,
        text: str | None,
        external_id: str | None,
        shown_special: Collection[int],
    ) -> _Stream:
        self.check_health()
        assert self._output is not None
        self._client.send(messages.Add(request))
        self.pulse.on_request(bool(self._streams))
        stream = _Stream(external_id or request.id, request.params)
        self._streams[request.id] = stream
        self._output.add(
            request.id,
            text,
            request.prompt_token_ids,
            request.params,
            external_id=external_id,
            shown_special=shown_special,
        )
        return stream

    def _drop(self, request_id: str) -> None:
        """Aborts a request whose caller has left."""
        assert self._output is not None
        if request_id in self._output:
            self._output.discard(request_id)
            with contextlib.suppress(EngineDeadError):
                self._client.send(messages.Abort([(request_id, None)]))

    async def abort(self, request_id: str) -> None:
        """Ends every open request of that name; its caller gets a last output with finish reason
        "abort". An unknown name is no error."""
        ids: list[tuple[str, int | None]] = [
            (internal, None)
            for internal, stream in self._streams.items()
            if stream.external_id == request_id
        ]
        if ids:
            self._client.send(messages.Abort(ids))

    # What the engine says (engine_client.Listener).

    def on_message(self, message: messages.FromEngine) -> None:
        """A step's results, a refusal or statistics."""
        if isinstance(message, messages.Step):
            self._on_step(message)
        elif isinstance(message, messages.Refused):
            kind = RequestRefused if message.could_never_run else ParamError
            stream = self._streams.pop(message.request_id, None)
            if stream is not None:
                assert self._output is not None
                self._output.discard(message.request_id, "error")
                stream.fail(kind(message.param, message.message))
        elif isinstance(message, messages.Stats):
            self.pulse.on_stats(message.values)
            future = self._stats.get(message.token)
            if future is not None and not future.done():
                future.set_result(message.values)

    def _on_step(self, message: messages.Step) -> None:
        assert self._output is not None
        self.pulse.on_step()
        outputs, aborts = self._output.process(message.updates)
        if aborts:
            self._abort_samples(aborts)
        for request_id, output in outputs:
            if output.finished:
                stream = self._streams.pop(request_id, None)
            else:
                stream = self._streams.get(request_id)
            if stream is not None:
                stream.put(output)

    def _abort_samples(self, samples: list[SampleId]) -> None:
        with contextlib.suppress(EngineDeadError):
            self._client.send(messages.Abort(list(samples)))

    def on_death(self, error: EngineDeadError) -> None:
        """The engine process has ended: nobody may wait for it any longer."""
        if not error.expected:
            log.error("%s", error)
            self.ended.set()
        for request_id, stream in self._streams.items():
            if self._output is not None:
                self._output.discard(request_id, "error")
            stream.fail(EngineDeadError(str(error)))
        self._streams.clear()
        for future in self._stats.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))
