"""Which form a model's calls of tools and its reasoning have: chosen by name, or from the model.

The parsers' names come from here and from plug-ins; a class is imported when it is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.config import ConfigError, nearest
from octavo.core.entry.reasoning import ReasoningParser
from octavo.core.entry.tools.base import ToolParser
from octavo.core.loading import chat
from octavo.core.loading.errors import TemplateError
from octavo.core.loading.tokenizer import Tokenizer

TOOL_PARSERS = {
    "deepseek": "octavo.core.entry.tools.deepseek:DeepSeekParser",
    "mistral": "octavo.core.entry.tools.mistral:MistralParser",
    "hermes": "octavo.core.entry.tools.hermes:HermesParser",
    "llama3": "octavo.core.entry.tools.llama3:Llama3Parser",
    "pythonic": "octavo.core.entry.tools.pythonic:PythonicParser",
}
"""In the order in which they are tried; plug-ins' come first."""
TOOL_ALIASES = {"qwen": "hermes", "llama3_json": "llama3", "deepseek_v3": "deepseek"}
REASONING_PARSERS = {
    "deepseek_r1": "octavo.core.entry.reasoning:DeepSeekReasoning",
    "qwen3": "octavo.core.entry.reasoning:Qwen3Reasoning",
}
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Formats:
    """How one model writes calls and reasoning. None: not at all, as far as is known.

    fallback: tools are told and calls rendered in the system message, because the template knows none.
    takes_tools: the template is told of tools. renders_calls: it writes the calls of earlier messages.
    special: ids of the vocabulary's special tokens, by spelling.
    """

    tools: type[ToolParser] | None
    reasoning: type[ReasoningParser] | None
    fallback: bool
    takes_tools: bool
    renders_calls: bool
    template: str
    special: Mapping[str, int]
    notes: tuple[str, ...] = ()

    def shown_special(self, markers: tuple[str, ...]) -> frozenset[int]:
        """Ids of these texts as far as they are special tokens."""
        return frozenset(self.special[text] for text in markers if text in self.special)


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Refuses parsers that nobody brings.

    Raises:
        ConfigError: with the names there are.
    """
    _named("tool_call_parser", tool_parser, tool_parsers())
    _named("reasoning_parser", reasoning_parser, reasoning_parsers())


def tool_parsers() -> dict[str, str]:
    """Parsers of calls by name, as "module:class"."""
    from octavo.plugins.manager import plugins

    added = plugins().tool_parsers()
    names = {**added, **{n: place for n, place in TOOL_PARSERS.items() if n not in added}}
    return {**names, **{alias: names[name] for alias, name in TOOL_ALIASES.items()}}


def reasoning_parsers() -> dict[str, str]:
    """Parsers of reasoning by name, as "module:class"."""
    from octavo.plugins.manager import plugins

    added = plugins().reasoning_parsers()
    return {**added, **{n: p for n, p in REASONING_PARSERS.items() if n not in added}}


def _named(option: str, name: str, known: Mapping[str, str]) -> None:
    if name not in (AUTO, NONE, *known):
        raise ConfigError(
            f"{option} {name!r} is not there{nearest(name, known)}; there are {AUTO}, {NONE}, "
            f"{', '.join(sorted(known))}"
        )


def choose_formats(
    tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str, fallback_prompt: bool
) -> Formats:
    """The forms for a model. "auto": the first parser that its template or its vocabulary fits.

    Raises:
        ConfigError: a parser that cannot be imported, or one that the fallback prompt contradicts.
    """
    try:
        template = tokenizer.template_for(None, [])
        takes, renders = chat.takes_tools(template), chat.renders_calls(template)
    except TemplateError:  # told to whoever sends a conversation
        template, takes, renders = "", False, False
    fallback = fallback_prompt and not takes

    def has_token(text: str) -> bool:
        return tokenizer.token_to_id(text) is not None

    known = tool_parsers()
    if fallback and tool_parser == AUTO:
        tool_parser = "hermes"
    if fallback and tool_parser not in (NONE, "hermes", "qwen"):
        raise ConfigError(
            f"fallback_tool_prompt asks for calls in the form of hermes, tool_call_parser is "
            f"{tool_parser!r}: leave one of them out"
        )
    tool_name, tools = _chosen(tool_parser, known, ToolParser, template, has_token)
    name, reasoning = _chosen(
        reasoning_parser, reasoning_parsers(), ReasoningParser, template, has_token
    )
    notes = []
    if tools is not None:
        how = "the built-in system prompt tells of tools" if fallback else _how(tool_parser)
        notes.append(f"tools: calls in the form of {tool_name} ({how})")
    if reasoning is not None:
        notes.append(f"reasoning: in the form of {name} ({_how(reasoning_parser)})")
    special = {tokenizer.id_to_token(i) or "": i for i in tokenizer.special_ids}
    return Formats(tools, reasoning, fallback, takes, renders, template, special, tuple(notes))


def _how(asked: str) -> str:
    return "from the model's template or vocabulary" if asked == AUTO else "as asked for"


def _chosen(
    name: str, known: Mapping[str, str], kind: Any, template: str, has_token: Any
) -> tuple[str, Any]:
    """The name and the class; None when it is asked for or nothing fits."""
    if name == NONE:
        return name, None
    if name != AUTO:
        return name, _imported(name, known[name], kind)
    for candidate, place in known.items():
        parser = _imported(candidate, place, kind)
        if parser.fits(template, has_token):
            return candidate, parser
    return name, None


def _imported(name: str, place: str, kind: Any) -> Any:
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"parser {name!r} ({place}) cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"parser {name!r} ({place}) is no {kind.__name__}")
    return found
