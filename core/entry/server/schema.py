"""What answers look like, for the OpenAPI document. The tests hold real answers against it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from octavo.core.types import MissReason

Role = Literal["developer", "system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "abort"]
ChatFinish = Literal["stop", "length", "tool_calls", "abort"]


class _Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


# Requests: what `Any` stands for in protocol.py.


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Function(msgspec.Struct, kw_only=True):
    """A tool that is called. parameters: the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class CalledFunction(msgspec.Struct, kw_only=True):
    """arguments: the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation. tool_calls: an assistant's; tool_call_id: a tool's."""

    role: Role
    content: str | list[TextPart]
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


# Answers.


class ErrorDetails(_Answer):
    """type: invalid_request_error, authentication_error, rate_limit_error or server_error. param: the
    path of the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Answer):
    """Every answer that is none; also an event of a stream that has begun."""

    error: ErrorDetails


class CacheMiss(_Answer):
    """Why the last `tokens` tokens of a prompt, from `at_token` on, were not in the prefix cache."""

    prompt: int
    reason: MissReason
    at_token: int
    tokens: int


class PromptTokensDetails(_Answer):
    """cached_tokens: prompt tokens that were found in the prefix cache; cache_misses: by prompt, why
    the rest were not."""

    cached_tokens: int
    cache_misses: list[CacheMiss]


class CompletionTokensDetails(_Answer):
    """reasoning_tokens: those of the reasoning, its tags included."""

    reasoning_tokens: int


class Usage(_Answer):
    """Tokens over all prompts and samples of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class RequestMetrics(_Answer):
    """Where a request's time went; `stopped_by` for each sample."""

    stopped_by: list[
        Literal["eos", "stop_token", "stop_string", "max_tokens", "context_length", "abort"]
    ]
    queued_seconds: float
    prefill_seconds: float
    time_to_first_token_seconds: float
    decode_seconds: float
    total_seconds: float
    cached_tokens: int
    recomputed_tokens: int
    preemptions: int
    swaps: int
    drafted_tokens: int
    accepted_tokens: int


class CompletionLogprobs(_Answer):
    """By token; a prompt's first has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(_Answer):
    """vLLM's."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None


class CompletionChoice(_Answer):
    """A sample, or what is new of it in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Embedding(_Answer):
    """embedding: numbers, or with encoding_format base64 their bytes as little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(_Answer):
    """Tokens over all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(_Answer):
    """Answer of /v1/embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Completion(_Answer):
    """Answer of /v1/completions, and of a stream each chunk."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | list[RequestMetrics] | None = None


class TopLogprob(_Answer):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that was drawn."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """By token."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(_Answer):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Answer):
    """A sample."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(_Answer):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics | None = None
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] | None = None


class CalledFunctionDelta(_Answer):
    """The name comes with the first piece."""

    arguments: str
    name: str | None = None


class ToolCallDelta(_Answer):
    """A call, or further text of its arguments."""

    index: int
    function: CalledFunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class ChatDelta(_Answer):
    """What is new; empty with the finish reason."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(_Answer):
    """A sample's news."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionChunk(_Answer):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class ResponseUsage(_Answer):
    """Tokens, in the words of /v1/responses."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(_Answer):
    """Answer of /v1/responses. `output` holds items of the types message, reasoning and function_call."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[Any]
    usage: ResponseUsage | None
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    previous_response_id: None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a response that streams: its type says which further fields it has."""

    type: str
    sequence_number: int


class Model(_Answer):
    """A served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(_Answer):
    """All served names: one model."""

    object: Literal["list"]
    data: list[Model]


class Tokens(_Answer):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(_Answer):
    """Answer of /detokenize."""

    prompt: str


class Version(_Answer):
    """Of this server."""

    version: str


class Healthy(_Answer):
    """Requests are taken."""


class Capabilities(_Answer):
    """What this server can do."""

    object: Literal["capabilities"]
    version: str
    model: dict[str, Any]
    device: dict[str, Any]
    kv_cache: dict[str, Any]
    limits: dict[str, Any]
    parameters: dict[str, Any]
