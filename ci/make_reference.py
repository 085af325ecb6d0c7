"""Writes docs/reference.md from the code: settings, request fields, Python types.

`python ci/make_reference.py` writes it; with `--check` it only says whether the page is current.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from octavo.core import params, types
from octavo.core.entry.async_llm import AsyncLLM
from octavo.core.entry.cli.settings import ENGINE, SERVER, Setting
from octavo.core.entry.embedding import EmbeddingRequestOutput, PoolingParams
from octavo.core.entry.llm import LLM
from octavo.core.entry.server import protocol
from octavo.core.entry.server.embeddings import EmbeddingRequest

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
REQUESTS = {
    "POST /v1/chat/completions": protocol.ChatRequest,
    "POST /v1/completions": protocol.CompletionRequest,
    "POST /v1/embeddings": EmbeddingRequest,
    "POST /tokenize": protocol.TokenizeRequest,
    "POST /detokenize": protocol.DetokenizeRequest,
}
DATA = (
    params.SamplingParams,
    types.RequestOutput,
    types.CompletionOutput,
    types.Logprob,
    types.Timings,
    PoolingParams,
    EmbeddingRequestOutput,
)


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows)])


def settings(group: tuple[Setting, ...]) -> str:
    rows: list[tuple[object, ...]] = []
    for s in group:
        default = "" if s.default in (None, ()) else f"`{s.default}`"
        rows.append((f"`{s.flag}`", f"`{s.variable}`", default, s.help))
    return table(("flag", "variable", "default", ""), rows)


def request_fields(kind: type[msgspec.Struct]) -> str:
    refused = set(protocol.NEUTRAL)
    names = [f for f in msgspec.structs.fields(kind) if f.name not in refused]
    rows: list[tuple[object, ...]] = []
    for field in names:
        annotation = str(inspect.get_annotations(_owner(kind, field.name)).get(field.name, ""))
        rows.append(
            (
                f"`{field.name}`",
                f"`{annotation.removesuffix(' | None')}`",
                "yes" if field.required else "",
            )
        )
    return table(("field", "type", "required"), rows)


def _owner(kind: type, name: str) -> type:
    return next(k for k in kind.__mro__ if name in inspect.get_annotations(k))


def data(kind: type) -> str:
    annotations = inspect.get_annotations(kind)
    parameters = inspect.signature(kind).parameters
    rows: list[tuple[object, ...]] = []
    for name, annotation in annotations.items():
        if name not in parameters:
            continue
        default = parameters[name].default
        shown = "" if default is inspect.Parameter.empty else f"`{_default(default)}`"
        rows.append((f"`{name}`", f"`{annotation}`", shown))
    return f"### {kind.__name__}\n\n{doc(kind)}\n\n" + table(("field", "type", "default"), rows)


def _default(value: Any) -> object:
    if type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS" or callable(value):
        return "empty"
    return repr(value) if not hasattr(value, "name") else value.name


def doc(thing: object) -> str:
    return (
        inspect.cleandoc(inspect.getdoc(thing) or "").split("\n\nArgs:")[0].split("\n\nRaises:")[0]
    )


def methods(kind: type, names: list[str] | None = None) -> str:
    parts = []
    for name, member in vars(kind).items():
        if name.startswith("_") or (names is not None and name not in names):
            continue
        if isinstance(member, property):
            parts.append(f"- `{name}`: {cell(doc(member))}")
            continue
        function = member.__func__ if isinstance(member, classmethod) else member
        if inspect.isfunction(function):
            arguments = str(inspect.signature(function)).replace("'", "")
            arguments = re.sub(r"<function (\w+) at 0x\w+>", r"\1", arguments)
            parts.append(f"- `{name}{arguments}`  \n  {cell(doc(function))}")
    return "\n".join(parts)


def page() -> str:
    parts = [
        "# Reference",
        "Made from the code by `python ci/make_reference.py`; a test says when it is not current.",
        "## Settings of the engine",
        "Flags of every command that runs a model, keys of `--config` files, variables, and keyword arguments of "
        "`LLM` and `AsyncLLM`.",
        settings(ENGINE),
        "## Settings of the server",
        settings(SERVER),
        "## HTTP requests",
        "Fields that are honoured; what they mean stands in [api.md](api.md). The same as OpenAPI: `GET /openapi.json`.",
    ]
    for route, kind in REQUESTS.items():
        parts += [f"### {route}", request_fields(kind)]
    parts += [
        "## Python",
        "### LLM",
        doc(LLM),
        methods(LLM),
        "### AsyncLLM",
        doc(AsyncLLM),
        methods(AsyncLLM),
    ]
    parts += [data(kind) for kind in DATA]
    parts += [
        "## The backend contract",
        "Hooks, classes, methods and fields for plug-ins: [plugins/contract.md](plugins/contract.md).",
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        return 0 if PAGE.is_file() and PAGE.read_text("utf-8") == text else 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
