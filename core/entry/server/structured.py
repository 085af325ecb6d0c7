"""The fields that ask for structured output, as OpenAI's clients and vLLM's send them."""

from __future__ import annotations

from typing import Any

from octavo.core.config import nearest
from octavo.core.entry.server.errors import bad_request
from octavo.core.params import STRUCTURED_KINDS, ParamError, StructuredOutputsParams

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_FORMATS = ("text", "json_object", "json_schema")
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")


def structured_outputs(request: Any) -> StructuredOutputsParams | None:
    """What `response_format`, `structured_outputs` or a guided_* field of a request asks for.

    Raises:
        ApiError: a 400 that names the field.
    """
    asked: dict[str, StructuredOutputsParams] = {}
    if (form := _format(request.response_format)) is not None:
        asked["response_format"] = form
    if request.structured_outputs is not None:
        asked["structured_outputs"] = _own(request.structured_outputs)
    for name in _GUIDED:
        if (value := getattr(request, name)) is not None:
            asked[name] = _made(name, {name.removeprefix("guided_"): value})
    if len(asked) > 1:
        names = " and ".join(asked)
        raise bad_request(
            list(asked)[-1],
            f"{names} contradict each other: an answer follows one grammar; send one",
        )
    return next(iter(asked.values()), None)


def _format(value: Any) -> StructuredOutputsParams | None:
    """OpenAI's response_format: {"type": "text" | "json_object" | "json_schema", "json_schema": …}."""
    where = "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _FORMATS:
        hint = nearest(kind, _FORMATS) if isinstance(kind, str) else ""
        raise bad_request(
            f"{where}.type",
            f"{where}.type must be one of {', '.join(_FORMATS)}, got {kind!r}{hint}",
        )
    _known(value, ("type", "json_schema") if kind == "json_schema" else ("type",), where)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise bad_request(f"{where}.json_schema", f"{where}.json_schema must be an object")
    _known(inner, ("name", "schema", "strict", "description"), f"{where}.json_schema")
    schema = inner.get("schema")
    if not isinstance(schema, (dict, bool)):
        raise bad_request(
            f"{where}.json_schema.schema", f"{where}.json_schema.schema must be a JSON schema"
        )
    return _made(f"{where}.json_schema.schema", {"json": schema})


def _own(value: Any) -> StructuredOutputsParams:
    where = "structured_outputs"
    if not isinstance(value, dict):
        raise bad_request(where, f"{where} must be an object")
    _known(value, (*STRUCTURED_KINDS, *_OPTIONS), where)
    return _made(where, {name: item for name, item in value.items() if item is not None})


def _known(value: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in names:
            field = f"{where}.{name}"
            raise bad_request(
                field, f"unknown parameter {field!r}{nearest(name, names)}", "unknown"
            )


def _made(where: str, fields: dict[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**fields)
    except ParamError as error:
        raise bad_request(where, str(error)) from None
