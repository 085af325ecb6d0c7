"""The fields of a chat request that have to do with tools and reasoning, checked and made use of."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.core.config import nearest
from octavo.core.entry.formats import Formats
from octavo.core.entry.reasoning import ReasoningParser
from octavo.core.entry.server.errors import bad_request
from octavo.core.entry.server.protocol import ChatRequest
from octavo.core.entry.tools.base import Tool, ToolParser
from octavo.core.entry.tools.grammar import arguments_schema, calls_grammar
from octavo.core.params import ParamError, SamplingParams, StructuredOutputsParams
from octavo.core.structured import check as check_grammar

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools.

    told: the tools as the template gets them. callable: those that may be called; none: text that
    looks like a call is content. forced: there must be a call. many: there may be several.
    """

    told: list[dict[str, Any]] | None = None
    callable: tuple[Tool, ...] = ()
    forced: bool = False
    many: bool = True


def tool_use(request: ChatRequest, formats: Formats) -> ToolUse:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: a 400 that names the field.
    """
    tools = checked_tools(request.tools)
    choice = request.tool_choice
    named = _named(choice)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice", "tool_choice asks for a call, but there are no tools")
        return ToolUse()
    if named is not None and named not in [tool.name for tool in tools]:
        raise bad_request(
            "tool_choice",
            f"tool_choice names {named!r}, but there is no such tool"
            f"{nearest(named, [tool.name for tool in tools])}",
        )
    if choice == "none":
        return ToolUse()
    if formats.tools is None:
        raise bad_request(
            "tools",
            "this server does not know how this model writes calls of tools "
            "(start it with --tool-call-parser NAME)",
            "unsupported",
        )
    if not (formats.takes_tools or formats.fallback or request.chat_template is not None):
        raise bad_request(
            "tools",
            "this model's chat template takes no tools (start the server with "
            "--fallback-tool-prompt to tell of them in the system message)",
            "unsupported",
        )
    callable_ = tuple(tool for tool in tools if named in (None, tool.name))
    return ToolUse(
        told=told_tools(request.tools or []),
        callable=callable_,
        forced=choice == "required" or named is not None,
        many=request.parallel_tool_calls is not False and named is None,
    )


def told_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as templates get them: without what only the server has to know, or is null."""
    known = ("name", "description", "parameters")
    return [
        {
            "type": "function",
            "function": {k: v for k in known if (v := tool["function"].get(k)) is not None},
        }
        for tool in tools
    ]


def checked_tools(value: Any) -> list[Tool]:
    """The tools of a request.

    Raises:
        ApiError: a 400 that names the tool and the field.
    """
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise bad_request("tools", f"tools must be a list of at most {MAX_TOOLS} tools")
    tools = [_tool(item, f"tools[{i}]") for i, item in enumerate(value)]
    names = [tool.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise bad_request("tools", f"two tools have the name {min(twice)!r}")
    return tools


def _tool(item: Any, at: str) -> Tool:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind != "function":
        raise bad_request(
            f"{at}.type",
            f"{at} is of type {kind!r}; this server takes only functions",
            "unsupported",
        )
    function = item.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{at}.function", f"{at}.function must be an object")
    known = ("name", "description", "parameters", "strict")
    for name in function:
        if name not in known:
            where = f"{at}.function.{name}"
            raise bad_request(where, f"unknown field {where}{nearest(name, known)}", "unknown")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"{at}.function.name",
            f"{at}.function.name must be 1 to 128 letters, digits, '_', '-' or '.', got {name!r:.80}",
        )
    for field, kind_, words in (
        ("description", str, "text"),
        ("parameters", dict, "a JSON schema, an object"),
        ("strict", bool, "true or false"),
    ):
        if function.get(field) is not None and not isinstance(function[field], kind_):
            where = f"{at}.function.{field}"
            raise bad_request(where, f"{where} must be {words}")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        where = f"{at}.function.parameters"
        raise bad_request(where, f"{where} must describe an object: arguments have names")
    return Tool(name, parameters, bool(function.get("strict")))


def _named(choice: Any) -> str | None:
    """The tool that tool_choice names."""
    if choice is None or choice in _MODES:
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if (
        not isinstance(choice, dict)
        or choice.get("type") != "function"
        or not isinstance(name, str)
    ):
        raise bad_request(
            "tool_choice",
            f"tool_choice must be one of {', '.join(_MODES)} or "
            '{"type": "function", "function": {"name": …}}',
        )
    return name


@dataclass(frozen=True, slots=True)
class Reading:
    """How the texts of one request's answers are read.

    opened: they begin inside the reasoning. shown_special: special tokens that are text for it.
    """

    use: ToolUse
    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    opened: bool = False
    shown_special: Collection[int] = ()

    @property
    def plain(self) -> bool:
        """The text is the answer."""
        return self.tools is None and self.reasoning is None


def reading_of(request: ChatRequest, use: ToolUse, formats: Formats, prompt: str | None) -> Reading:
    """How the answers to this prompt are read."""
    tools = formats.tools if use.callable else None
    reasoning, opened = formats.reasoning, False
    if reasoning is not None:
        continued = None
        if request.continue_final_message:
            content = request.messages[-1].get("content")
            continued = content if isinstance(content, str) else json.dumps(content)
        mode = reasoning.mode(prompt or "", request.chat_template_kwargs or {}, continued)
        reasoning, opened = (None, False) if mode is None else (reasoning, mode)
    markers = (*(tools.markers if tools else ()), *(_tags(reasoning) if reasoning else ()))
    return Reading(use, tools, reasoning, opened, formats.shown_special(markers))


def _tags(reasoning: type[ReasoningParser]) -> tuple[str, ...]:
    return reasoning.start, reasoning.stop


async def constrained(params: SamplingParams, reading: Reading, formats: Formats) -> SamplingParams:
    """The parameters with the grammar that forced or strict calls, and reasoning, make of them.

    Raises:
        ApiError: a 400 that names the tool whose schema cannot be enforced.
    """
    use, wanted = reading.use, params.structured_outputs
    form = reading.tools.form(formats.template) if reading.tools is not None else None
    if form is not None:
        strict = any(tool.strict for tool in use.callable)
        lazy = not use.forced and strict and wanted is None and bool(form.trigger)
        if use.forced or lazy or wanted is not None:
            await _check_schemas(use, lazy)
            lark = calls_grammar(
                form, use.callable, special=formats.special, many=use.many, lazy=lazy
            )
            if use.forced or lazy:
                wanted = StructuredOutputsParams(grammar=lark)
            elif wanted is not None:
                wanted = msgspec.structs.replace(wanted, alternative=lark)
    if wanted is not None and reading.reasoning is not None:
        preamble = reading.reasoning.preamble(reading.opened, formats.special)
        wanted = msgspec.structs.replace(wanted, preamble=preamble)
    if wanted is params.structured_outputs:
        return params
    return msgspec.structs.replace(params, structured_outputs=wanted)


async def _check_schemas(use: ToolUse, lazy: bool) -> None:
    names = [item["function"]["name"] for item in use.told or ()]
    for tool in use.callable:
        if lazy and not tool.strict:
            continue
        schema = StructuredOutputsParams(json=arguments_schema(tool))
        try:  # may take seconds: not on the event loop
            await asyncio.to_thread(check_grammar, schema)
        except ParamError as error:
            where = f"tools[{names.index(tool.name)}].function.parameters"
            raise bad_request(where, f"{where}: {error}") from None
