"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from octavo.core.entry.inputs import Prompt
from octavo.core.entry.server.answer import DONE, Envelope, Report, Usage, finish_fields
from octavo.core.entry.server.conversation import checked_messages
from octavo.core.entry.server.errors import bad_request
from octavo.core.entry.server.fanout import Outputs, run_all
from octavo.core.entry.server.http import Answer, Call
from octavo.core.entry.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs_json
from octavo.core.entry.server.protocol import ChatRequest, TokenizeRequest
from octavo.core.entry.server.state import ServerState
from octavo.core.types import CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams


async def chat_completions(state: ServerState, call: Call) -> Answer:
    """The endpoint's handler."""
    request = state.decode(call, ChatRequest)
    llm = state.ready()
    model = state.check_model(request.model)
    request.check()
    state.check_queue()
    params = request.sampling(llm.inputs.default_params)
    prompt = await render(state, request)
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    params = msgspec.structs.replace(params, output_kind=kind)
    outputs = run_all(
        llm,
        [prompt],
        params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
    )
    answer = _ChatAnswer(state, call, request, params)
    if request.stream:
        return answer.stream(Envelope("chatcmpl", "chat.completion.chunk", model), outputs)
    return await answer.whole(Envelope("chatcmpl", "chat.completion", model), outputs)


async def render(state: ServerState, request: ChatRequest | TokenizeRequest) -> Prompt:
    """The conversation as tokens, by the model's chat template.

    Raises:
        ApiError, ParamError: a 400 that names the field.
    """
    messages = checked_messages(request.messages or [])
    if request.chat_template is not None and not state.trust_request_chat_template:
        raise bad_request(
            "chat_template",
            "this server takes no chat templates from requests "
            "(start it with --trust-request-chat-template)",
        )
    continued = bool(request.continue_final_message)
    generation_prompt = request.add_generation_prompt
    return await state.ready().render_chat(
        messages,
        chat_template=request.chat_template,
        add_generation_prompt=not continued if generation_prompt is None else generation_prompt,
        continue_final_message=continued,
        add_special_tokens=bool(request.add_special_tokens),
        chat_template_kwargs=request.chat_template_kwargs,
    )


class _ChatAnswer:
    """Makes the answer of one request out of the engine's outputs."""

    def __init__(
        self, state: ServerState, call: Call, request: ChatRequest, params: SamplingParams
    ) -> None:
        self._request = request
        self._top = params.logprobs or 0
        self._names = TokenNames(
            state.ready().get_tokenizer(), bool(request.return_tokens_as_token_ids)
        )
        self._usage = Usage(call)
        self._report = Report(request.include_metrics, params)

    async def whole(self, envelope: Envelope, outputs: Outputs) -> bytes:
        """One JSON answer."""
        last = None
        async for index, output in outputs:
            self._usage.add(index, output)
            self._report.add(index, output)
            last = output
        assert last is not None
        extra: dict[str, Any] = {}
        if self._request.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs_json(last.prompt_logprobs)
        if self._request.return_token_ids:
            extra["prompt_token_ids"] = last.prompt_token_ids
        choices = [self._choice(sample) for sample in last.outputs]
        return envelope.whole(choices, self._usage.json(), **extra, **self._report.fields())

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        choice = {
            "index": sample.index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": self._logprobs(sample),
            **finish_fields(sample),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    def _logprobs(self, sample: CompletionOutput) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(sample.logprobs or (), self._top, self._names)

    async def stream(self, envelope: Envelope, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Server-sent events: per choice the role, the text as it comes, the finish reason; then
        the usage if asked for, and [DONE]."""
        request = self._request
        begun: set[int] = set()
        async for index, output in outputs:
            self._usage.add(index, output)
            self._report.add(index, output)
            usage = self._usage.json() if request.usage_always else None
            events = [
                envelope.chunk([choice], usage, request.usage_at_end)
                for sample in output.outputs
                for choice in self._deltas(sample, output, begun)
            ]
            if events:
                yield b"".join(events)
        if request.usage_at_end or self._report.wanted:
            usage = self._usage.json() if request.usage_at_end else None
            yield envelope.chunk([], usage, request.usage_at_end, **self._report.fields())
        yield DONE

    def _deltas(
        self, sample: CompletionOutput, output: RequestOutput, begun: set[int]
    ) -> list[dict[str, Any]]:
        choices = []
        if sample.index not in begun:
            begun.add(sample.index)
            first = self._delta(sample.index, {"role": "assistant", "content": ""})
            if self._request.return_token_ids:
                first["prompt_token_ids"] = output.prompt_token_ids
            choices.append(first)
        logprobs = self._logprobs(sample) if sample.token_ids else None
        wants_ids = bool(self._request.return_token_ids and sample.token_ids)
        if sample.text or logprobs or wants_ids:
            choice = self._delta(sample.index, {"content": sample.text}, logprobs)
            if wants_ids:
                choice["token_ids"] = sample.token_ids
            choices.append(choice)
        if sample.finish_reason is not None:
            choices.append({**self._delta(sample.index, {}), **finish_fields(sample)})
        return choices

    @staticmethod
    def _delta(
        index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
