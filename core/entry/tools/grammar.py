"""Calls as a grammar: what the engine's structured output enforces, in Lark as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.entry.tools.base import CallForm, Tool

# One space at most: a model that may write any white space may write nothing else.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_SHARED = ("$defs", "definitions")


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text as Lark, in which special tokens stand as such. special: their ids by spelling."""
    if not text:
        return ""
    found = [re.escape(name) for name in sorted(special, key=len, reverse=True) if name in text]
    parts = re.split(f"({'|'.join(found)})", text) if found else [text]
    return " ".join(
        f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def schema_text(schema: Any) -> str:
    """A JSON schema to stand in Lark behind %json. No `::=` in it: that is how EBNF is known."""
    return json.dumps(schema).replace("::=", ":\\u003a=")


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema that a tool's arguments have to follow: an object, of named properties if any are
    named, written without needless white space."""
    schema = {**tool.parameters, "type": "object", "x-guidance": _LAYOUT}
    if not any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")):
        schema.setdefault("additionalProperties", False)
    return schema


def calls_grammar(
    form: CallForm,
    tools: Sequence[Tool],
    *,
    special: Mapping[str, int],
    many: bool,
    lazy: bool = False,
) -> str:
    """Lark whose text is one call, or several with `many`.

    Args:
        special: ids of special tokens by spelling, those of the markup at least.
        lazy: there may be no call, and any text in front; with `many` also between and behind. Needs
            a form with a trigger. Tools that are not strict then take any arguments.
    """
    heads = {tool.name: form.head.replace("NAME", tool.name) for tool in tools}
    before, trigger = form.before, form.trigger if lazy else ""
    if before.startswith(trigger):
        before = before[len(trigger) :]
    else:
        heads = {name: head[len(trigger) :] for name, head in heads.items()}
    rules: list[str] = []
    for number, tool in enumerate(tools):
        head, tail = literal(heads[tool.name], special), literal(form.tail, special)
        rules.append(f"call_{number}: {head} arguments_{number} {tail}".rstrip())
        if form.python:
            rules += _python_arguments(number, tool)
            continue
        schema: dict[str, Any] = {"type": "object", "x-guidance": _LAYOUT}
        if tool.strict or not lazy:
            schema = arguments_schema(tool)
        rules.append(f"arguments_{number}: %json {schema_text(schema)}")
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    between = literal(form.between, special)
    # Where each call has its own trigger, what stands between two is text.
    repeated = many and (not lazy or form.before)
    several = f"({between} call)*" if repeated else ""
    body = " ".join(
        filter(None, [literal(before, special), "call", several, literal(form.after, special)])
    )
    rules.append(f"calls: {body}")
    if not lazy:
        return "\n".join(["start: calls", *rules, ""])
    rules.append("TEXT: /(.|\\n)*/")
    if trigger in special:
        rules.append(f"opening: TEXT {literal(trigger, special)}")
    else:
        rules.append(f"opening[lazy]: TEXT {literal(trigger, special)}")
    start = "(opening calls)* TEXT" if many else "opening calls | TEXT"
    return "\n".join([f"start: {start}", *rules, ""])


def _python_arguments(number: int, tool: Tool) -> list[str]:
    """`key=value, …`: properties in the schema's order, those that are not required optional."""
    properties = tool.parameters.get("properties") or {}
    required = set(tool.parameters.get("required") or ())
    shared = {key: tool.parameters[key] for key in _SHARED if key in tool.parameters}
    rules, last = [f"arguments_{number}: a_{number}_0_0"], len(properties)
    for at, (key, schema) in enumerate(properties.items()):
        value = schema if isinstance(schema, dict) else {}
        rules.append(
            f"v_{number}_{at}: %json {schema_text({**shared, **value, 'x-guidance': _LAYOUT})}"
        )
        for some in (0, 1):
            comma = '", " ' if some else ""
            taken = f"{comma}{json.dumps(f'{key}=')} v_{number}_{at} a_{number}_{at + 1}_1"
            skipped = "" if key in required else f" | a_{number}_{at + 1}_{some}"
            rules.append(f"a_{number}_{at}_{some}: {taken}{skipped}")
    rules += [f'a_{number}_{last}_{some}: ""' for some in (0, 1)]
    return rules
