"""The bodies of requests, and how they become sampling parameters.

Every field of the OpenAI API and of vLLM's extensions to it is known here. A field that this server
cannot honour is refused unless it holds a value that asks for nothing; one that it has never heard
of is refused with the nearest it has. Nothing is silently ignored, save labels that by their nature
have no effect on the answer (`user`, `metadata`, …).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from octavo.core.config import nearest
from octavo.core.entry.server.errors import bad_request, refuse_unsupported, unsupported
from octavo.core.entry.server.structured import structured_outputs
from octavo.core.params import MAX_LOGPROBS, SamplingParams

MAX_LOGIT_BIAS = 1024
"""Entries in logit_bias."""

# Fields without an implementation: the values that ask for nothing, besides null.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "kv_transfer_params": (),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}

_SAMPLING = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: one more chunk with the usage; continuous_usage_stats: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat and completions share. None means "not given"."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    include_metrics: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None

    # Labels: no effect on the answer.
    user: str | None = None
    request_id: str | None = None
    session_id: str | None = None

    # Known, and refused unless neutral.
    documents: Any = None
    kv_transfer_params: Any = None
    logprob_token_ids: Any = None
    prompt_embeds: Any = None
    repetition_detection: Any = None
    return_prompt_text: Any = None
    service_tier: Any = None
    stream_interval: Any = None
    thinking_token_budget: Any = None
    truncation_side: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None

    def check(self) -> None:
        """Refuses what is not implemented and combinations that contradict each other.

        Raises:
            ApiError: a 400 that names the field.
        """
        refuse_unsupported(self, NEUTRAL)
        options = self.stream_options
        if options is not None and not self.stream:
            raise bad_request("stream_options", "stream_options needs stream=true")
        if options is not None and options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation")
        if self.stream and not self.use_beam_search and (self.best_of or 1) > (self.n or 1):
            raise bad_request(
                "best_of",
                f"best_of={self.best_of} with n={self.n or 1} cannot be streamed: which samples are the "
                "best is known at the end. Set stream=false, or best_of to n",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request(
                "prompt_logprobs", "prompt_logprobs cannot be streamed; set stream=false"
            )

    @property
    def usage_at_end(self) -> bool:
        """A last chunk carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        """Every chunk carries the usage so far."""
        return bool(self.usage_at_end and self.stream_options.continuous_usage_stats)  # type: ignore[union-attr]

    def sampling_values(self) -> dict[str, Any]:
        """What the request sets of `SamplingParams`, for `InputProcessor.default_params`."""
        values = {name: getattr(self, name) for name in _SAMPLING}
        values = {name: value for name, value in values.items() if value is not None}
        if (structured := structured_outputs(self)) is not None:
            values["structured_outputs"] = structured
        if self.logit_bias:
            values["logit_bias"] = _token_keys(self.logit_bias)
        return values


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None

    audio: Any = None
    echo: bool | None = None
    function_call: Any = None
    functions: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def sampling(self, defaults: Any) -> SamplingParams:
        """The sampling parameters. `defaults`: `InputProcessor.default_params`.

        Raises:
            ApiError, ParamError: a value that cannot be used.
        """
        if self.echo:
            raise bad_request("echo", "echo is not supported for chat; leave it out", "unsupported")
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        limit = getattr(self, name)
        if limit is not None and limit < 1:
            raise bad_request(name, f"{name} must be at least 1, got {limit}")
        values = self.sampling_values()
        top = self.top_logprobs
        if top is not None and not -1 <= top <= MAX_LOGPROBS:
            raise bad_request("top_logprobs", f"top_logprobs must be at least 0, got {top}")
        if top and not self.logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs logprobs=true")
        if self.logprobs:
            values["logprobs"] = top or 0
        # Chat runs to the end of the context unless told otherwise by the request or the model.
        if limit is not None:
            values["max_tokens"] = limit
        params: SamplingParams = defaults(**{"max_tokens": None, **values})
        return params


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None

    def sampling(self, defaults: Any) -> SamplingParams:
        """The sampling parameters. `defaults`: `InputProcessor.default_params`.

        Raises:
            ApiError, ParamError: a value that cannot be used.
        """
        values = self.sampling_values()
        limit = self.max_tokens
        if limit is not None:
            if limit < 0 or (limit == 0 and not self.echo):
                raise bad_request(
                    "max_tokens",
                    f"max_tokens must be at least 1 (0 only with echo=true), got {limit}",
                )
            values["max_tokens"] = limit
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                values["prompt_logprobs"] = self.logprobs
        params: SamplingParams = defaults(**values)
        return params


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: text, or a conversation as chat would render it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*?)`")
_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")


def decode(body: bytes, kind: type[Body]) -> Body:
    """Reads a request body.

    Raises:
        ApiError: a 400 that says what is wrong and names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise bad_request(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    except RecursionError:
        raise bad_request(None, "the body's JSON is nested too deeply", "invalid_json") from None


def decode_lenient(body: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """As `decode`, but parameters that are unknown or not supported are left out.

    Returns the request and the names left out, in the order in which they were sent.

    Raises:
        ApiError: a 400 for anything else that is wrong.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return decode(body, kind), []
    if not isinstance(raw, dict):
        return decode(body, kind), []
    leave_out = getattr(kind, "leave_out", None)
    ignored = leave_out(raw) if leave_out is not None else cut(raw, kind.__struct_fields__, NEUTRAL)
    options = raw.get("stream_options")
    if "stream_options" in kind.__struct_fields__ and isinstance(options, dict):
        known = StreamOptions.__struct_fields__
        ignored += [f"stream_options.{name}" for name in cut(options, known, NEUTRAL)]
        if options.pop("include_obfuscation", None):
            ignored.append("stream_options.include_obfuscation")
    try:
        return msgspec.convert(raw, type=kind), ignored
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from None


def cut(
    raw: dict[str, Any], known: Collection[str], neutral: Mapping[str, tuple[Any, ...]]
) -> list[str]:
    """Takes out of a request's body what is not `known`, and what stands in `neutral` with a value that is
    none of those there. Returns the names, in the order in which they were sent."""
    ignored = [n for n, v in raw.items() if n not in known or not asks_for_nothing(n, v, neutral)]
    for name in ignored:
        del raw[name]
    return ignored


def asks_for_nothing(
    name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> bool:
    """Whether a field may stand there: it is implemented, or its value asks for nothing."""
    return value is None or name not in neutral or any(_same(value, item) for item in neutral[name])


def _explained(message: str, kind: type[msgspec.Struct]) -> Exception:
    found = _PATH.search(message)
    path = found["path"].lstrip(".").replace("[...]", "") if found else ""
    text = _PATH.sub("", message)
    if unknown := _UNKNOWN.match(text):
        field = unknown["field"]
        known = kind.__struct_fields__ if not path else StreamOptions.__struct_fields__
        name = f"{path}.{field}" if path else field
        return bad_request(name, f"unknown parameter {name!r}{nearest(field, known)}", "unknown")
    if missing := _MISSING.match(text):
        name = f"{path}.{missing['field']}" if path else missing["field"]
        return bad_request(name, f"{name} is required", "missing")
    text = text[:1].lower() + text[1:]
    return bad_request(path or None, f"{path or 'the body'}: {text}", "invalid_type")


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and of one type where Python takes True for 1."""
    return type(value) is type(neutral) and bool(value == neutral)


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise bad_request(
            "logit_bias", f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are taken"
        )
    result = {}
    for key, value in bias.items():
        if not re.fullmatch(r"-?[0-9]{1,10}", key):
            raise bad_request("logit_bias", f"logit_bias keys must be token ids, got {key!r}")
        result[int(key)] = value
    return result
