"""Tools for a model whose chat template knows none: told in the system message, in Hermes' form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.entry.tools.hermes import CLOSE, OPEN

_INTRODUCTION = (
    "You may call functions to help with the user's request. The functions are, one a line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call a function, write its name and arguments as JSON between tags:\n"
    f'{OPEN}\n{{{{"name": "NAME", "arguments": {{{{"KEY": "VALUE"}}}}}}}}\n{CLOSE}'
)


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The conversation with tools, calls and their results as text in ordinary messages."""
    result = [_plain(message) for message in messages]
    if tools:
        told = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = _INTRODUCTION.format(tools=told)
        if result and result[0]["role"] == "system":
            result[0]["content"] = f"{result[0]['content']}\n\n{text}"
        else:
            result.insert(0, {"role": "system", "content": text})
    return _merged(result)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls") or ()
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    written = [
        f'{OPEN}\n{{"name": {json.dumps(call["function"]["name"])}, '
        f'"arguments": {call["function"]["arguments"] or "{}"}}}\n{CLOSE}'
        for call in calls
    ]
    return {**kept, "content": "\n".join(filter(None, [content, *written]))}


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of several calls stand in one message: many templates want turns to alternate."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last["role"] == message["role"] == "user"
            and message["content"].startswith("<tool_response>")
            and last["content"].endswith("</tool_response>")
        ):
            last["content"] += "\n" + message["content"]
        else:
            merged.append(message)
    return merged
