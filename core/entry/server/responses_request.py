"""The body of POST /v1/responses, and the same request as chat has it."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.entry.server.errors import (
    ApiError,
    bad_request,
    refuse_unsupported,
    unsupported,
)
from octavo.core.entry.server.protocol import ChatRequest, cut

LOGPROBS = "message.output_text.logprobs"
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
# Fields without an implementation, and the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}
_NEUTRAL_OF_TEXT: dict[str, tuple[Any, ...]] = {"verbosity": ("medium",)}
_WHY = {
    "previous_response_id": "this server keeps no responses: send the earlier items in input",
    "conversation": "this server keeps no responses: send the earlier items in input",
    "store": "this server keeps no responses; set store=false or leave it out",
    "truncation": "only 'disabled' is supported: shorten the input",
}
_PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "stream",
    "model",
)


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. None means "not given"."""

    input: Any
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: Any = None
    include: list[str] | None = None

    # Beyond the API: as for chat.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Labels: no effect on the answer.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    # Known, and refused unless neutral.
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    reasoning: Any = None
    service_tier: Any = None
    store: Any = None
    truncation: Any = None

    def as_chat(self) -> ChatRequest:
        """The same request as chat has it.

        Raises:
            ApiError: a 400 that names the field.
        """
        self._check()
        limit = self.max_output_tokens
        if limit is not None and limit < 1:
            raise bad_request(
                "max_output_tokens", f"max_output_tokens must be at least 1, got {limit}"
            )
        values = {name: getattr(self, name) for name in _PASSED}
        return ChatRequest(
            messages=self._messages(),
            max_completion_tokens=limit,
            response_format=self._format(),
            tools=None if self.tools is None else [_tool(t, i) for i, t in enumerate(self.tools)],
            tool_choice=_choice(self.tool_choice),
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            **values,
        )

    @classmethod
    def leave_out(cls, raw: dict[str, Any]) -> list[str]:
        """Takes out of a request's body what would be refused as unknown or not supported, of a wrong type
        aside: see `decode_lenient`. Returns the names."""
        ignored = cut(raw, cls.__struct_fields__, NEUTRAL)
        if isinstance(include := raw.get("include"), list):
            ignored += [f"include[{i}]" for i, name in enumerate(include) if name != LOGPROBS]
            raw["include"] = [name for name in include if name == LOGPROBS]
        if isinstance(text := raw.get("text"), dict):
            ignored += [f"text.{n}" for n in cut(text, ("format", "verbosity"), _NEUTRAL_OF_TEXT)]
        options = raw.get("stream_options")
        if isinstance(options, dict):
            named = cut(options, ("include_obfuscation",), {"include_obfuscation": (False,)})
            ignored += [f"stream_options.{name}" for name in named]
        return ignored

    @classmethod
    def honoured(cls) -> list[str]:
        """The fields that do what they say."""
        return [name for name in cls.__struct_fields__ if name not in NEUTRAL]

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens come with their log-probabilities."""
        return LOGPROBS in (self.include or ())

    def _check(self) -> None:
        refuse_unsupported(self, NEUTRAL, _WHY)
        for i, name in enumerate(self.include or ()):
            if name != LOGPROBS:
                where = f"include[{i}]"
                raise bad_request(
                    where, f"{where}: {name!r} is not supported; there is {LOGPROBS}", "unsupported"
                )
        if self.top_logprobs and not self.wants_logprobs:
            raise bad_request("top_logprobs", f'top_logprobs needs include=["{LOGPROBS}"]')
        options = self.stream_options
        if options is not None and not (
            isinstance(options, dict) and set(options) <= {"include_obfuscation"}
        ):
            raise bad_request(
                "stream_options", "stream_options may hold include_obfuscation and nothing else"
            )
        if options and options.get("include_obfuscation"):
            raise unsupported("stream_options.include_obfuscation")

    def _format(self) -> Any:
        text = self.text
        if text is None:
            return None
        if not isinstance(text, dict) or not set(text) <= {"format", "verbosity"}:
            raise bad_request("text", "text must be an object with format")
        if text.get("verbosity") not in (None, *_NEUTRAL_OF_TEXT["verbosity"]):
            raise bad_request(
                "text.verbosity", "text.verbosity is not supported by this server", "unsupported"
            )
        form = text.get("format")
        if form is None:
            return None
        if isinstance(form, dict) and form.get("type") == "json_schema":
            inner = {k: v for k, v in form.items() if k != "type"}
            return {"type": "json_schema", "json_schema": inner}
        return form

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
            return messages
        if not isinstance(self.input, list) or not self.input:
            raise bad_request("input", "input must be text or a list of items, not empty")
        for i, item in enumerate(self.input):
            _take_item(item, f"input[{i}]", messages)
        return messages


def _take_item(item: Any, at: str, messages: list[dict[str, Any]]) -> None:
    if not isinstance(item, dict):
        raise bad_request(at, f"{at} must be an item, an object")
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            where = f"{at}.role"
            raise bad_request(
                where, f"{where} must be one of {', '.join(_ROLES)}, got {role!r:.80}"
            )
        messages.append({"role": role, "content": _content(item.get("content"), f"{at}.content")})
    elif kind == "function_call":
        call = {
            "id": _text(item, "call_id", at),
            "type": "function",
            "function": {
                "name": _text(item, "name", at),
                "arguments": _text(item, "arguments", at),
            },
        }
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{at}.output")
        messages.append(
            {"role": "tool", "tool_call_id": _text(item, "call_id", at), "content": content}
        )
    elif kind != "reasoning":  # what was thought before is no part of a later prompt
        raise bad_request(
            f"{at}.type",
            f"{at} is of type {kind!r:.80}; this server takes message, function_call, "
            "function_call_output and reasoning",
            "unsupported",
        )


def _text(item: dict[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{at}.{name}", f"{at}.{name} must be text")
    return value


def _content(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(at, f"{at} must be text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        where = f"{at}[{i}]"
        if kind not in _TEXT_PARTS:
            raise bad_request(
                where, f"{where} is of type {kind!r:.80}; this model takes only text", "unsupported"
            )
        texts.append(_text(part, "text", where))
    return "\n".join(texts)


def _tool(tool: Any, index: int) -> Any:
    """A function in the API's flat form as chat has it; what is none is left for chat to refuse."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    inner = {name: value for name, value in tool.items() if name != "type"}
    if inner.get("strict") is None:
        inner.pop("strict", None)
    return {"type": "function", "function": inner}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


# Where chat's words for a field differ from this endpoint's.
_RENAMED = (
    ("structured_outputs.json", "text.format.schema"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("messages", "input"),
    (".function", ""),
)


def in_own_words(error: ApiError) -> ApiError:
    """An error about a chat request, with the fields' names as they are here."""
    param, message = error.param, error.message
    for theirs, ours in _RENAMED:
        param = param and param.replace(theirs, ours)
        message = message.replace(theirs, ours)
    return ApiError(error.status, message, param=param, code=error.code)
