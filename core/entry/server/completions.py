"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from octavo.core.entry.inputs import Prompt, PromptInput
from octavo.core.entry.server.answer import DONE, Envelope, Report, Usage, finish_fields
from octavo.core.entry.server.errors import bad_request
from octavo.core.entry.server.fanout import Outputs, run_all
from octavo.core.entry.server.http import Answer, Call
from octavo.core.entry.server.logprobs import (
    CompletionLogprobs,
    TokenNames,
    prompt_logprobs_json,
)
from octavo.core.entry.server.protocol import CompletionRequest
from octavo.core.entry.server.state import ServerState
from octavo.core.params import RequestOutputKind, SamplingParams
from octavo.core.types import CompletionOutput, LogprobsAt, RequestOutput

MAX_SAMPLES = 4096
"""Prompts times n of one request: it is answered as a whole, and must be held until then."""


async def completions(state: ServerState, call: Call) -> Answer:
    """The endpoint's handler."""
    request = state.decode(call, CompletionRequest)
    llm = state.ready()
    model = state.check_model(request.model)
    state.check_task("generate")
    request.check()
    state.check_queue()
    params = request.sampling(llm.inputs.default_params)
    special = True if request.add_special_tokens is None else request.add_special_tokens
    given = prompt_list(request.prompt)
    if len(given) * params.n > MAX_SAMPLES:
        raise bad_request(
            "prompt",
            f"{len(given)} prompts with n={params.n} are {len(given) * params.n} samples; "
            f"one request may have {MAX_SAMPLES}",
        )
    prompts = await asyncio.gather(
        *(llm.tokenize(prompt, add_special_tokens=special) for prompt in given)
    )
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    params = msgspec.structs.replace(params, output_kind=kind)
    outputs = run_all(
        llm,
        prompts,
        params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
    )
    answer = _CompletionAnswer(state, call, request, params, prompts)
    envelope = Envelope("cmpl", "text_completion", model)
    if request.stream:
        return answer.stream(envelope, outputs)
    return await answer.whole(envelope, outputs)


def prompt_list(prompt: Any) -> list[PromptInput]:
    """The four forms of `prompt`: text, texts, token ids, lists of token ids.

    Raises:
        ApiError: a 400 for anything else.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if all(isinstance(item, list) for item in prompt):
            return list(prompt)
    raise bad_request(
        "prompt",
        "prompt must be text, a list of texts, a list of token ids or a list of such lists; "
        f"got {prompt!r:.80}",
    )


class _Choice:
    """What one choice needs to remember between its chunks."""

    def __init__(self, logprobs: CompletionLogprobs | None) -> None:
        self.logprobs = logprobs
        self.begun = False


class _CompletionAnswer:
    """Makes the answer of one request out of the engine's outputs. Choice number: index of the
    prompt · n + index of the sample."""

    def __init__(
        self,
        state: ServerState,
        call: Call,
        request: CompletionRequest,
        params: SamplingParams,
        prompts: Sequence[Prompt],
    ) -> None:
        self._request = request
        self._n = params.n
        self._prompts = prompts
        self._tokenizer = state.ready().get_tokenizer()
        self._names = TokenNames(self._tokenizer, bool(request.return_tokens_as_token_ids))
        self._special = (
            self._tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        )
        self._usage = Usage(call)
        self._report = Report(request.include_metrics, params)
        self._choices: dict[int, _Choice] = {}
        self._prompt_logprobs: dict[int, Sequence[LogprobsAt | None]] = {}

    async def whole(self, envelope: Envelope, outputs: Outputs) -> bytes:
        """One JSON answer."""
        last: dict[int, RequestOutput] = {}
        async for index, output in outputs:
            self._usage.add(index, output)
            self._report.add(index, output)
            last[index] = output
        choices = [
            self._choice(index, sample, last[index])
            for index in sorted(last)
            for sample in last[index].outputs
        ]
        return envelope.whole(choices, self._usage.json(), **self._report.fields())

    async def stream(self, envelope: Envelope, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Server-sent events: text as it comes, the finish reason with the last of it; then the
        usage if asked for, and [DONE]."""
        request = self._request
        async for index, output in outputs:
            self._usage.add(index, output)
            self._report.add(index, output)
            usage = self._usage.json() if request.usage_always else None
            events = [
                envelope.chunk([choice], usage, request.usage_at_end)
                for choice in (self._choice(index, s, output) for s in output.outputs)
                if choice["text"]
                or choice["logprobs"]
                or choice["finish_reason"]
                or choice.get("token_ids")
            ]
            if events:
                yield b"".join(events)
        if request.usage_at_end or self._report.wanted:
            usage = self._usage.json() if request.usage_at_end else None
            yield envelope.chunk([], usage, request.usage_at_end, **self._report.fields())
        yield DONE

    def _choice(
        self, prompt_index: int, sample: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """All of a choice, or what is new of it."""
        request = self._request
        number = prompt_index * self._n + sample.index
        choice = self._choices.get(number)
        if choice is None:
            choice = self._choices[number] = _Choice(self._new_logprobs())
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        first, choice.begun = not choice.begun, True
        text, ids = sample.text, list(sample.token_ids)
        entries: list[LogprobsAt | None] = list(sample.logprobs or ())
        if first and request.echo:
            text = self._prompt_text(prompt_index) + text
            if choice.logprobs is not None:
                ids = output.prompt_token_ids + ids
                entries = [*self._prompt_logprobs.get(prompt_index, [None]), *entries]
        result: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": choice.logprobs.render(ids, entries)
            if choice.logprobs is not None and ids
            else None,
            **finish_fields(sample),
        }
        if request.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if request.return_token_ids:
            result["token_ids"] = list(sample.token_ids)
            if first:
                result["prompt_token_ids"] = output.prompt_token_ids
        return result

    def _new_logprobs(self) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        return CompletionLogprobs(self._names, self._request.logprobs, self._special)

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
