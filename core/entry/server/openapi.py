"""GET /openapi.json: the API as a document, made from the structs that requests are read into."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

import octavo
from octavo.core.entry.server import protocol, schema
from octavo.core.entry.server.embeddings import MAX_INPUTS, EmbeddingRequest
from octavo.core.entry.server.responses_request import LOGPROBS, NEUTRAL, ResponsesRequest
from octavo.core.entry.server.tools import MAX_TOOLS
from octavo.core.params import MAX_LOGPROBS

_GENERATION_ERRORS = (400, 404, 413, 429, 500, 503)
# (path, method, summary, request, answer, event of a stream, statuses of errors)
_ROUTES: tuple[tuple[str, str, str, Any, Any, Any, tuple[int, ...]], ...] = (
    (
        "/v1/chat/completions", "post", "Answer a conversation",
        protocol.ChatRequest, schema.ChatCompletion, schema.ChatCompletionChunk, _GENERATION_ERRORS,
    ),
    (
        "/v1/completions", "post", "Complete prompts",
        protocol.CompletionRequest, schema.Completion, schema.Completion, _GENERATION_ERRORS,
    ),
    (
        "/v1/responses", "post", "Answer items by items",
        ResponsesRequest, schema.Response, schema.ResponseEvent, _GENERATION_ERRORS,
    ),
    (
        "/v1/embeddings", "post", "Embed inputs",
        EmbeddingRequest, schema.EmbeddingList, None, _GENERATION_ERRORS,
    ),
    ("/tokenize", "post", "Text or a conversation to token ids",
     protocol.TokenizeRequest, schema.Tokens, None, (400, 404, 413, 503)),
    ("/detokenize", "post", "Token ids to text",
     protocol.DetokenizeRequest, schema.Text, None, (400, 404, 413, 503)),
    ("/v1/models", "get", "The served names", None, schema.ModelList, None, (503,)),
    ("/v1/models/{model}", "get", "One of them", None, schema.Model, None, (404, 503)),
    ("/v1/capabilities", "get", "What this server can do",
     None, schema.Capabilities, None, (503,)),
    ("/health", "get", "Whether requests are taken", None, schema.Healthy, None, (503,)),
    ("/ping", "get", "The same", None, schema.Healthy, None, (503,)),
    ("/version", "get", "The server's version", None, schema.Version, None, ()),
    ("/metrics", "get", "Prometheus", None, None, None, (503,)),
)  # fmt: skip

_TOKEN = {"type": "integer", "minimum": 0}
_PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": _TOKEN, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": _TOKEN, "minItems": 1},
            "minItems": 1,
        },
    ],
    "description": "text, texts, token ids, or lists of token ids",
}
# Bounds that `SamplingParams` and the handlers hold requests to, beside the types.
_BOUNDS: dict[str, dict[str, Any]] = {
    "best_of": {"minimum": 1, "maximum": 1024},
    "length_penalty": {"minimum": -1000, "maximum": 1000},
    "n": {"minimum": 1, "maximum": 1024},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "dimensions": {"minimum": 1},
    "temperature": {"minimum": 0},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "min_tokens": {"minimum": 0},
    "logprobs": {"minimum": -1, "maximum": MAX_LOGPROBS},
    "top_logprobs": {"minimum": -1, "maximum": MAX_LOGPROBS},
    "prompt_logprobs": {"minimum": -1, "maximum": MAX_LOGPROBS},
    "truncate_prompt_tokens": {"minimum": -1},
    "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "cache_salt": {"minLength": 1, "maxLength": 128},
    "allowed_token_ids": {"minItems": 1},
}


_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["type", "name"],
}
_ITEM = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
    "description": "a message, or one of the other types with its own fields",
}
# Fields of /v1/responses whose types say too little.
_RESPONSES: dict[str, Any] = {
    "input": {
        "anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}],
        "description": "text, or items",
    },
    "include": {
        "anyOf": [{"type": "array", "items": {"const": LOGPROBS}}, {"type": "null"}],
        "default": None,
    },
    "stream_options": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"include_obfuscation": {"enum": [None, False]}},
                "additionalProperties": False,
            },
            {"type": "null"},
        ],
        "default": None,
    },
    "text": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "format": {
                        "type": ["object", "null"],
                        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
                        "required": ["type"],
                    },
                    "verbosity": {"enum": [None, "medium"]},
                },
                "additionalProperties": False,
            },
            {"type": "null"},
        ],
        "default": None,
    },
    "tools": {
        "anyOf": [
            {"type": "array", "items": _FUNCTION, "maxItems": MAX_TOOLS},
            {"type": "null"},
        ],
        "default": None,
    },
}


@cache
def document() -> bytes:
    """The document, as JSON."""
    kinds = [kind for route in _ROUTES for kind in route[3:6] if kind is not None]
    kinds = list(dict.fromkeys([*kinds, schema.Error, schema.Message, schema.Tool]))
    references, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    reference = dict(zip(kinds, references, strict=True))
    for route in _ROUTES:
        if route[3] is not None:
            _describe(components[route[3].__name__], reference)
    paths: dict[str, dict[str, Any]] = {}
    for path, method, *rest in _ROUTES:
        paths.setdefault(path, {})[method] = _operation(path, reference, *rest)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Octavo",
                "version": octavo.__version__,
                "description": "An OpenAI-compatible server. With --lenient, fields that are unknown "
                "or not supported are left out instead of refused.",
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


def _event(event: Any, reference: dict[Any, Any]) -> dict[str, Any]:
    """The schema of one event of a stream: OpenAPI 3.1 has none for the stream as a whole."""
    forms = {"anyOf": [reference[event], reference[schema.Error]]}
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": forms,
    }
    if event is schema.ResponseEvent:
        names = {"event": {"type": "string", "description": "the type of the data"}}
        return {"type": "object", "properties": {**names, "data": data}, "required": ["data"]}
    end = {"const": "[DONE]", "description": "the last event"}
    return {"type": "object", "properties": {"data": {"anyOf": [end, data]}}, "required": ["data"]}


def _operation(
    path: str,
    reference: dict[Any, Any],
    summary: str,
    request: Any,
    answer: Any,
    event: Any,
    errors: tuple[int, ...],
) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if answer is not None:
        content = {"application/json": {"schema": reference[answer]}}
    if event is not None:
        content["text/event-stream"] = {"schema": _event(event, reference)}
    failed = {"application/json": {"schema": reference[schema.Error]}}
    answers = {"200": {"description": "done", "content": content}}
    for status in errors:
        words = schema.Error.__doc__ or ""
        answers[str(status)] = {"description": words, "content": failed}
    operation: dict[str, Any] = {"summary": summary, "responses": answers}
    if request is not None:
        body = {"application/json": {"schema": reference[request]}}
        operation["requestBody"] = {"required": True, "content": body}
    if "{model}" in path:
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _describe(component: dict[str, Any], reference: dict[Any, Any]) -> None:
    """Adds to a request's schema what its types cannot say."""
    properties: dict[str, Any] = component["properties"]
    for name, property_ in properties.items():
        if name in protocol.NEUTRAL:
            values = [None, *protocol.NEUTRAL[name]]
            properties[name] = {"enum": values, "default": None, "description": "not supported"}
            continue
        for option in property_.get("anyOf", [property_]):
            if option.get("type") not in (None, "null", "boolean"):
                option.update(_BOUNDS.get(name, {}))
    if "messages" in properties:
        required = "messages" in component.get("required", ())
        item = reference[schema.Message]
        messages: dict[str, Any] = {"type": "array", "items": item, "minItems": 1}
        properties["messages"] = messages if required else {"anyOf": [messages, {"type": "null"}]}
    if "encoding_format" in properties:
        inputs = {
            **_PROMPT,
            "anyOf": [{**form, "maxItems": MAX_INPUTS} for form in _PROMPT["anyOf"]],
        }
        properties["input"] = inputs
    elif "input" in properties:
        properties.update(_RESPONSES)
        for name, neutral in NEUTRAL.items():
            known = {"enum": [None, *neutral], "default": None, "description": "not supported"}
            properties[name] = known
    elif "tools" in properties:
        tools = {"type": "array", "items": reference[schema.Tool], "maxItems": MAX_TOOLS}
        properties["tools"] = {"anyOf": [tools, {"type": "null"}], "default": None}
    if "early_stopping" in properties:
        early = {
            "anyOf": [{"type": "boolean"}, {"const": "never"}, {"type": "null"}],
            "default": None,
        }
        properties["early_stopping"] = early
    if "suffix" in properties:  # completions
        properties["prompt"] = _PROMPT
        component["required"] = [*component.get("required", ()), "prompt"]
    if "tokens" in properties:
        properties["tokens"] = {"type": "array", "items": _TOKEN}
