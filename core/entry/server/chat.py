"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from octavo.core.entry.inputs import Prompt
from octavo.core.entry.reasoning import TokenCounter
from octavo.core.entry.server.answer import DONE, Envelope, Report, Usage, finish_fields
from octavo.core.entry.server.conversation import checked_messages
from octavo.core.entry.server.errors import bad_request
from octavo.core.entry.server.fanout import Outputs, run_all
from octavo.core.entry.server.http import Answer, Call
from octavo.core.entry.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs_json
from octavo.core.entry.server.parts import Parts
from octavo.core.entry.server.protocol import ChatRequest, TokenizeRequest
from octavo.core.entry.server.state import ServerState
from octavo.core.entry.server.tools import (
    Reading,
    constrained,
    reading_of,
    told_tools,
    tool_use,
)
from octavo.core.entry.tools.prompt import with_tools
from octavo.core.params import RequestOutputKind, SamplingParams
from octavo.core.types import CompletionOutput, RequestOutput


async def chat_completions(state: ServerState, call: Call) -> Answer:
    """The endpoint's handler."""
    request = state.decode(call, ChatRequest)
    state.ready()
    model = state.check_model(request.model)
    state.check_task("generate")
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    params, reading, outputs = await begun(state, request, kind)
    answer = _ChatAnswer(state, call, request, params, reading)
    if request.stream:
        return answer.stream(Envelope("chatcmpl", "chat.completion.chunk", model), outputs)
    return await answer.whole(Envelope("chatcmpl", "chat.completion", model), outputs)


async def begun(
    state: ServerState, request: ChatRequest, kind: RequestOutputKind
) -> tuple[SamplingParams, Reading, Outputs]:
    """How a request's tokens are drawn, how its text is read, and its outputs; nothing runs before the
    first of these is asked for.

    Raises:
        ApiError, ParamError: a 400 that names the field; a 429.
    """
    request.check()
    state.check_queue()
    llm = state.llm
    use = tool_use(request, state.formats)
    params = request.sampling(llm.inputs.default_params)
    prompt = await render(state, request, use.told)
    reading = reading_of(request, use, state.formats, prompt.text)
    params = await constrained(params, reading, state.formats)
    params = msgspec.structs.replace(params, output_kind=kind)
    outputs = run_all(
        llm,
        [prompt],
        params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        shown_special=reading.shown_special,
    )
    return params, reading, outputs


async def render_tokenize(state: ServerState, request: TokenizeRequest) -> Prompt:
    """A conversation to count or look at: its tools are told of, whatever can be called."""
    return await render(state, request, told_tools(request.tools or []) or None)


async def render(
    state: ServerState,
    request: ChatRequest | TokenizeRequest,
    tools: Sequence[dict[str, Any]] | None,
) -> Prompt:
    """The conversation as tokens, by the model's chat template.

    tools: those that the template is to tell of.

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
    if request.chat_template is None:
        messages, tools = _fitted(state, messages, tools, continued)
    generation_prompt = request.add_generation_prompt
    return await state.ready().render_chat(
        messages,
        chat_template=request.chat_template,
        add_generation_prompt=not continued if generation_prompt is None else generation_prompt,
        continue_final_message=continued,
        add_special_tokens=bool(request.add_special_tokens),
        chat_template_kwargs=request.chat_template_kwargs,
        tools=tools,
    )


def _fitted(
    state: ServerState,
    messages: list[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    continued: bool,
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]] | None]:
    """Tools and calls as the model's own template can tell of them, so that none is lost."""
    formats = state.formats
    calls = [i for i, message in enumerate(messages) if message.get("tool_calls")]
    if formats.fallback and (tools or calls or any(m["role"] == "tool" for m in messages)):
        if continued and messages[-1].get("tool_calls"):
            raise bad_request(
                "continue_final_message",
                "continue_final_message is set, but the last message ends in tool_calls",
            )
        return with_tools(messages, tools), None
    if calls and formats.template and not formats.renders_calls:
        where = f"messages[{calls[0]}].tool_calls"
        raise bad_request(
            where,
            f"{where}: this model's chat template knows no calls of tools (start the server with "
            "--fallback-tool-prompt to write them as text)",
            "unsupported",
        )
    return messages, tools


class Choice:
    """One sample: its text taken apart, and the tokens of its reasoning counted."""

    def __init__(self, reading: Reading, include_reasoning: bool, tokenizer: Any) -> None:
        self.parts = Parts(reading, include_reasoning)
        self.begun = False
        self.counter: TokenCounter | None = None
        if reading.reasoning is not None:
            self.counter = TokenCounter(reading.reasoning(reading.opened), tokenizer)


class _ChatAnswer:
    """Makes the answer of one request out of the engine's outputs."""

    def __init__(
        self,
        state: ServerState,
        call: Call,
        request: ChatRequest,
        params: SamplingParams,
        reading: Reading,
    ) -> None:
        self._request = request
        self._reading = reading
        self._tokenizer = state.ready().get_tokenizer()
        self._top = params.logprobs or 0
        self._names = TokenNames(self._tokenizer, bool(request.return_tokens_as_token_ids))
        self._usage = Usage(call)
        self._report = Report(request.include_metrics, params)
        self._choices: dict[int, Choice] = {}
        if reading.reasoning is not None:
            self._usage.reasoning = {}

    def _take(self, index: int, output: RequestOutput) -> None:
        self._usage.add(index, output)
        self._report.add(index, output)
        if self._usage.reasoning is None:
            return
        for sample in output.outputs:
            counter = self._choice(sample).counter
            assert counter is not None
            counter.add(sample.token_ids)
            self._usage.reasoning[sample.index] = counter.count

    def _choice(self, sample: CompletionOutput) -> Choice:
        choice = self._choices.get(sample.index)
        if choice is None:
            shown = self._request.include_reasoning is not False
            choice = self._choices[sample.index] = Choice(self._reading, shown, self._tokenizer)
        return choice

    async def whole(self, envelope: Envelope, outputs: Outputs) -> bytes:
        """One JSON answer."""
        last = None
        async for index, output in outputs:
            self._take(index, output)
            last = output
        assert last is not None
        extra: dict[str, Any] = {}
        if self._request.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs_json(last.prompt_logprobs)
        if self._request.return_token_ids:
            extra["prompt_token_ids"] = last.prompt_token_ids
        choices = [self._whole(sample) for sample in last.outputs]
        return envelope.whole(choices, self._usage.json(), **extra, **self._report.fields())

    def _whole(self, sample: CompletionOutput) -> dict[str, Any]:
        parts = self._choice(sample).parts
        parts.push(sample.text)
        parts.finish(sample.finish_reason == "length")
        choice = {
            "index": sample.index,
            "message": parts.message(),
            "logprobs": self._logprobs(sample),
            **_ended(sample, parts),
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
        async for index, output in outputs:
            self._take(index, output)
            usage = self._usage.json() if request.usage_always else None
            events = [
                envelope.chunk([choice], usage, request.usage_at_end)
                for sample in output.outputs
                for choice in self._deltas(sample, output)
            ]
            if events:
                yield b"".join(events)
        if request.usage_at_end or self._report.wanted:
            usage = self._usage.json() if request.usage_at_end else None
            yield envelope.chunk([], usage, request.usage_at_end, **self._report.fields())
        yield DONE

    def _deltas(self, sample: CompletionOutput, output: RequestOutput) -> list[dict[str, Any]]:
        choices = []
        choice = self._choice(sample)
        if not choice.begun:
            choice.begun = True
            first = self._delta(sample.index, {"role": "assistant", "content": ""})
            if self._request.return_token_ids:
                first["prompt_token_ids"] = output.prompt_token_ids
            choices.append(first)
        logprobs = self._logprobs(sample) if sample.token_ids else None
        wants_ids = bool(self._request.return_token_ids and sample.token_ids)
        deltas = choice.parts.push(sample.text)
        if sample.finish_reason is not None:
            deltas += choice.parts.finish(sample.finish_reason == "length")
        if not deltas and (logprobs or wants_ids):
            # The tokens have no text of their own, or it is held back.
            deltas.append({"content": ""} if self._reading.plain else {})
        for number, delta in enumerate(deltas):
            # Tokens are told of once, with the first of what they brought.
            event = self._delta(sample.index, delta, None if number else logprobs)
            if wants_ids and not number:
                event["token_ids"] = sample.token_ids
            choices.append(event)
        if sample.finish_reason is not None:
            choices.append({**self._delta(sample.index, {}), **_ended(sample, choice.parts)})
        return choices

    @staticmethod
    def _delta(
        index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _ended(sample: CompletionOutput, parts: Parts) -> dict[str, Any]:
    """The finish fields: a sample that ended in calls says so."""
    fields = finish_fields(sample)
    if fields["finish_reason"] == "stop" and parts.called:
        fields["finish_reason"] = "tool_calls"
    return fields
