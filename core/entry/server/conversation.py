"""Chat messages as clients send them, checked and reduced to what a text model's template takes."""

from __future__ import annotations

from typing import Any

from octavo.core.config import nearest
from octavo.core.entry.server.errors import bad_request

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_NO_TOOLS = "tools are not supported by this server"
# Answers that clients send back carry these, empty, when they come from an OpenAI client.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
_TEXTS = ("name", "reasoning", "reasoning_content")


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
    if role in ("tool", "function"):
        raise bad_request(f"{at}.role", f"{at}.role is {role!r}: {_NO_TOOLS}", "unsupported")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(
            f"{at}.role",
            f"{at}.role must be one of {', '.join(_ROLES)}, got {role!r}"
            f"{nearest(str(role), _ROLES)}",
        )
    result: dict[str, Any] = {"role": _ROLES[role], "content": _content(message, at)}
    for name, value in message.items():
        if name in ("role", "content") or value is None:
            continue
        where = f"{at}.{name}"
        if name in _TEXTS:
            if not isinstance(value, str):
                raise bad_request(where, f"{where} must be text")
            result[name] = value
        elif name not in _NEUTRAL:
            known = ("role", "content", *_TEXTS, *_NEUTRAL)
            raise bad_request(where, f"unknown field {where}{nearest(name, known)}", "unknown")
        elif value not in _NEUTRAL[name]:
            raise bad_request(where, f"{where} is not supported by this server", "unsupported")
    return result


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
