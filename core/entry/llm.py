"""The offline API: `LLM(...)`, with the engine in the caller's own thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from octavo.core.config import DEFAULT_MODEL, EngineConfig, prepare_thread_environment
from octavo.core.engine import ModelInfo
from octavo.core.entry.bar import Bar
from octavo.core.entry.beam_search import BeamSearchOutput, BeamSearchParams
from octavo.core.entry.embedding import (
    Embedder,
    EmbeddingRequestOutput,
    PoolingParams,
    params_for,
)
from octavo.core.entry.front import Front, load_front, load_progress
from octavo.core.entry.inputs import (
    Conversation,
    InputProcessor,
    Prompt,
    PromptInput,
    sampling_defaults,
)
from octavo.core.entry.preload import collector_paused, preload_torch
from octavo.core.loading.tokenizer import Tokenizer
from octavo.core.output import OutputProcessor
from octavo.core.params import ParamError, RequestOutputKind, SamplingParams
from octavo.core.types import Request, RequestOutput

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model, loaded and ready to generate. Names and defaults are vLLM's.

    Use it as a context manager, or call `shutdown()`, to free the model's memory. Not thread-safe:
    `AsyncLLM` serves concurrent callers.

    Args:
        model: folder, .gguf file, hub id or pypi:<package>.
        options: the fields of `EngineConfig`.

    Raises:
        ConfigError: an option that is unknown or cannot be used here.
        ModelError: the model cannot be found, read or run.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        self._load(EngineConfig.from_kwargs(model=model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """As the constructor, from a configuration."""
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    def _load(self, config: EngineConfig) -> None:
        prepare_thread_environment()
        with collector_paused():
            from octavo.core.entry.wiring import build_engine

            preload_torch()
            progress = load_progress(config)
            front = load_front(config, progress)
            engine = build_engine(config, files=front.files, progress=progress)
        self._set_up(config, front, engine)

    @classmethod
    def from_parts(cls, config: EngineConfig, front: Front, engine: Any) -> LLM:
        """An LLM around an engine that is already there."""
        llm = cls.__new__(cls)
        llm._set_up(config, front, engine)
        return llm

    def _set_up(self, config: EngineConfig, front: Front, engine: Any) -> None:
        self.config = config
        self._engine = engine
        self._process = os.getpid()
        self._busy = threading.Lock()
        self._outputs = OutputProcessor(front.tokenizer)
        self._inputs = InputProcessor(
            front.tokenizer,
            max_model_len=engine.info.max_model_len,
            vocab_size=engine.info.vocab_size,
            eos_token_ids=tuple(engine.info.eos_token_ids),
            max_logprobs=config.max_logprobs,
            defaults=sampling_defaults(front.generation_config),
        )
        self._embedder = Embedder(self._inputs, engine.info)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Frees the model. The object cannot be used afterwards; may be called twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    @property
    def info(self) -> ModelInfo:
        """The engine's facts: context length, device and why, dtype, KV blocks, start-up phases."""
        info: ModelInfo = self._live().info
        return info

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._inputs.tokenizer

    def get_default_sampling_params(self, **values: Any) -> SamplingParams:
        """`SamplingParams`' defaults, over them the model's own (its generation_config), over them
        `values`."""
        return self._inputs.default_params(**values)

    def tokenize(self, prompt: PromptInput, *, add_special_tokens: bool = True) -> Prompt:
        """A prompt ready for `generate` and `stream`."""
        return self._inputs.tokenize(prompt, add_special_tokens=add_special_tokens)

    def generate(
        self,
        prompts: PromptInput | Prompt | Sequence[PromptInput | Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts; the outputs stand in the prompts' order.

        Args:
            prompts: text, token ids, {"prompt": …} or {"prompt_token_ids": …}, or a list of these.
            sampling_params: one for all, one for each, or None for the model's defaults.
            use_tqdm: show a progress bar when standard error is a terminal.
            priority: one for each prompt; lower runs first.

        Raises:
            ParamError: a prompt or parameter that cannot be used. Nothing has run then, or what ran
                was aborted; the LLM can be used again.
        """
        inputs = [
            p if isinstance(p, Prompt) else self._inputs.tokenize(p) for p in _prompt_list(prompts)
        ]
        return self._complete(inputs, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, rendered with the model's chat template.

        Raises:
            ParamError: as `generate`; also a conversation that the template refuses.
        """
        inputs = [
            self._inputs.chat(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                tools=tools,
            )
            for conversation in _conversation_list(messages)
        ]
        return self._complete(inputs, sampling_params, use_tqdm, None)

    def as_completed(
        self,
        prompts: Sequence[PromptInput | Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """As `generate`, yielding (index of the prompt, its whole output) as each one ends, so that
        what is done is not lost when the rest is not. Closing the iterator aborts what is open."""
        inputs = [p if isinstance(p, Prompt) else self._inputs.tokenize(p) for p in prompts]
        requests = self._requests(inputs, sampling_params, RequestOutputKind.FINAL_ONLY, None)
        index = {request.id: i for i, request in enumerate(requests)}
        with Bar(len(inputs), use_tqdm) as bar:
            for request_id, output in self._run(inputs, requests):
                bar.advance(_num_tokens(output))
                yield index[request_id], output

    def stream(
        self, prompt: PromptInput | Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Completes one prompt, yielding what is new at every step. Closing the iterator aborts."""
        ready = prompt if isinstance(prompt, Prompt) else self._inputs.tokenize(prompt)
        [request] = self._requests([ready], sampling_params, RequestOutputKind.DELTA, None)
        for _, output in self._run([ready], [request]):
            yield output

    def beam_search(
        self,
        prompts: PromptInput | Prompt | Sequence[PromptInput | Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most likely texts behind each prompt, best first.

        Raises:
            ParamError: as `generate`; also more beams than the engine can hold at once.
        """
        outputs = self.generate(prompts, params.sampling(), use_tqdm)
        return [BeamSearchOutput.of(output) for output in outputs]

    def embed(
        self,
        prompts: PromptInput | Prompt | Sequence[PromptInput | Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds prompts, pooled as the checkpoint says; the outputs stand in the prompts' order.

        Raises:
            ParamError: a prompt or parameter that cannot be used, or a model that embeds nothing.
            EmbeddingFailed: a prompt's step failed.
        """
        given = _prompt_list(prompts)
        params = params_for(pooling_params, len(given))
        if priority is not None and len(priority) != len(given):
            raise ParamError("priority", f"{len(priority)} priorities for {len(given)} prompts")
        inputs = [self._embedder.prompt(p, q) for p, q in zip(given, params, strict=True)]
        order = priority if priority is not None else [0] * len(given)
        requests = [
            self._embedder.request(prompt, each, priority=first)
            for prompt, each, first in zip(inputs, params, order, strict=True)
        ]
        done: dict[str, EmbeddingRequestOutput] = {}
        with Bar(len(inputs), use_tqdm) as bar:
            for request_id, output in self._run(inputs, requests):
                done[request_id] = EmbeddingRequestOutput.of(output)
                bar.advance(len(output.prompt_token_ids))
        return [done[request.id] for request in requests]

    def render_chat(self, messages: Conversation, **options: Any) -> Prompt:
        """A conversation as a prompt for `generate` and `stream`; `options` as those of `chat`."""
        return self._inputs.chat(messages, **options)

    def _live(self) -> Any:
        if self._engine is None:
            raise RuntimeError("this LLM was shut down; make a new one")
        if self._process != os.getpid():
            # The threads that compute stayed in the parent: a step would wait for them for ever.
            raise RuntimeError(
                "this LLM was made before a fork and works only in its own process: make one in "
                "each child, started with multiprocessing's 'spawn'"
            )
        return self._engine

    def _complete(
        self,
        prompts: list[Prompt],
        sampling_params: Params,
        show_progress: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        requests = self._requests(prompts, sampling_params, RequestOutputKind.FINAL_ONLY, priority)
        done: dict[str, RequestOutput] = {}
        with Bar(len(prompts), show_progress) as bar:
            for request_id, output in self._run(prompts, requests):
                done[request_id] = output
                bar.advance(_num_tokens(output))
        return [done[request.id] for request in requests]

    def _requests(
        self,
        prompts: list[Prompt],
        sampling_params: Params,
        kind: RequestOutputKind,
        priority: Sequence[int] | None,
    ) -> list[Request]:
        self._live()
        params = self._params_list(sampling_params, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise ParamError("priority", f"{len(priority)} priorities for {len(prompts)} prompts")
        return [
            self._inputs.request(
                prompt,
                msgspec.structs.replace(each, output_kind=kind),
                priority=priority[i] if priority is not None else 0,
            )
            for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]

    def _params_list(self, params: Params, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        each = list(params) if isinstance(params, Sequence) else [params]
        if wrong := [p for p in each if not isinstance(p, SamplingParams)]:
            raise ParamError(
                "sampling_params",
                f"sampling_params must be SamplingParams, got {type(wrong[0]).__name__}",
            )
        if len(each) != count:
            raise ParamError(
                "sampling_params",
                f"{len(each)} sampling_params for {count} prompts: give one, or one for each",
            )
        return each

    def _run(
        self, prompts: list[Prompt], requests: list[Request]
    ) -> Iterator[tuple[str, RequestOutput]]:
        """Runs requests to their end. Left early, by an error, an interrupt or its caller, it aborts
        what is still open, so that the engine is free again."""
        engine = self._live()
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "a stream of this LLM is still open, or another thread uses it: finish or close it "
                "first, or use AsyncLLM, which serves many at once"
            )
        try:
            for prompt, request in zip(prompts, requests, strict=True):
                # Known here before the engine has it: an interrupt in between must not leave it there.
                self._outputs.add(request.id, prompt.text, request.prompt_token_ids, request.params)
                engine.add(request)
            while len(self._outputs):
                outputs, aborts = self._outputs.process(engine.step())
                if aborts:
                    engine.abort(aborts)
                yield from outputs
                if len(self._outputs) and not engine.has_unfinished():
                    raise RuntimeError("the engine lost a request")
        finally:
            try:
                left = [request.id for request in requests if request.id in self._outputs]
                for request_id in left:
                    self._outputs.discard(request_id)
                if left:
                    engine.abort(left)
            finally:
                self._busy.release()


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(sample.token_ids) for sample in output.outputs)


def _prompt_list(prompts: Any) -> list[PromptInput | Prompt]:
    """One prompt or several, as a list. A list of whole numbers is one prompt."""
    if isinstance(prompts, (str, Mapping, Prompt)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise ParamError("prompts", f"prompts cannot be of type {type(prompts).__name__}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def _conversation_list(messages: Any) -> list[Conversation]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise ParamError("messages", "messages must be a conversation or a list of conversations")
    if isinstance(messages[0], Mapping):
        return [messages]
    return list(messages)
