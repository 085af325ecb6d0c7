"""Chat messages as clients send them, checked and reduced to what a text model's template takes."""

from __future__ import annotations

import json
from typing import Any

from octavo.core.config import nearest
from octavo.core.entry.server.errors import bad_request

_ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# Answers that clients send back carry these, empty, when they come from an OpenAI client.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}
_TEXTS = ("name", "reasoning", "reasoning_content")
_TOOLS = ("tool_calls", "tool_call_id")


def checked_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages for `InputProcessor.chat`: roles the templates know, content as text.

    Raises:
        ApiError: a 400 that names the message and the field.
    """
    if not messages:
        raise bad_request("messages", "messages must hold at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_request(at, f"{at} must be an object with role and content")
    role = message.get("role")
    if role == "function":
        raise bad_request(
            f"{at}.role",
            f"{at}.role is 'function': results of calls have the role tool",
            "unsupported",
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(
            f"{at}.role",
            f"{at}.role must be one of {', '.join(_ROLES)}, got {role!r}"
            f"{nearest(str(role), _ROLES)}",
        )
    result: dict[str, Any] = {"role": _ROLES[role]}
    calls = _calls(message, at)
    if message.get("content") is not None or not calls:
        result["content"] = _content(message, at)
    if calls:
        result["tool_calls"] = calls
    _link(message, role, at, result)
    for name, value in message.items():
        if name in ("role", "content", *_TOOLS) or value is None:
            continue
        where = f"{at}.{name}"
        if name in _TEXTS:
            if not isinstance(value, str):
                raise bad_request(where, f"{where} must be text")
            result[name] = value
        elif name not in _NEUTRAL:
            known = ("role", "content", *_TEXTS, *_TOOLS, *_NEUTRAL)
            raise bad_request(where, f"unknown field {where}{nearest(name, known)}", "unknown")
        elif value not in _NEUTRAL[name]:
            raise bad_request(where, f"{where} is not supported by this server", "unsupported")
    return result


def _link(message: dict[str, Any], role: str, at: str, result: dict[str, Any]) -> None:
    """The call that a tool's message answers."""
    where, value = f"{at}.tool_call_id", message.get("tool_call_id")
    if role == "tool":
        if not isinstance(value, str):
            raise bad_request(where, f"{where} must be the id of the call that this answers")
        result["tool_call_id"] = value
    elif value is not None:
        raise bad_request(where, f"{where}: only a message of the role tool answers a call")


def _calls(message: dict[str, Any], at: str) -> list[dict[str, Any]]:
    """The calls that an assistant's message ends in."""
    where, calls = f"{at}.tool_calls", message.get("tool_calls")
    if calls is None or calls == []:
        return []
    if message["role"] != "assistant":
        raise bad_request(where, f"{where}: only an assistant's message holds calls")
    if not isinstance(calls, list):
        raise bad_request(where, f"{where} must be a list of calls")
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, at: str) -> dict[str, Any]:
    kind = call.get("type", "function") if isinstance(call, dict) else None
    function = call.get("function") if isinstance(call, dict) else None
    if kind != "function" or not isinstance(function, dict):
        raise bad_request(
            at, f'{at} must be {{"id": …, "type": "function", "function": {{"name", "arguments"}}}}'
        )
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise bad_request(f"{at}.function.name", f"{at}.function.name must be the name of a tool")
    where = f"{at}.function.arguments"
    try:
        # Decoded for the check alone: some templates want the text as it was.
        valid = arguments in (None, "") or isinstance(json.loads(arguments), dict)
    except (ValueError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise bad_request(
            where, f"{where} must be the text of a JSON object, got {arguments!r:.80}"
        )
    identity = call.get("id")
    if identity is not None and not isinstance(identity, str):
        raise bad_request(f"{at}.id", f"{at}.id must be text")
    return {
        **({} if identity is None else {"id": identity}),
        "type": "function",
        "function": {"name": name, "arguments": arguments or "{}"},
    }


def _content(message: dict[str, Any], at: str) -> str:
    where = f"{at}.content"
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    raise bad_request(where, f"{where} must be text or a list of text parts, got {content!r:.80}")


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise bad_request(
            where, f"{where} is of type {kind!r}; this model takes only text parts", "unsupported"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise bad_request(f"{where}.text", f"{where}.text must be text")
    return text
