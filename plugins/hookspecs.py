"""The hooks a plug-in may implement. Importing this module imports no torch.

A plug-in is a module named by an entry point in group `octavo`; functions marked `@hookimpl` in it
are its answers. Everything heavy belongs inside the functions, or in what they return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from octavo.core.contract import Backend
from octavo.plugins.overrides import OpOverride

if TYPE_CHECKING:
    from octavo.core.loading.files import ModelFiles

PROJECT = "octavo"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def octavo_backends() -> Sequence[Backend]:  # type: ignore[empty-body]
    """Backends this plug-in brings. Constructing one must be cheap and import nothing heavy."""


@hookspec
def octavo_ops() -> Sequence[OpOverride]:  # type: ignore[empty-body]
    """Single ops of other backends that this plug-in has better bodies for."""


@hookspec
def octavo_models() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Model classes by Hugging Face architecture name, as "module:class"; imported when needed."""


@hookspec
def octavo_quantization_schemes() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Quantisation schemes by name (of `--quantization`, or a checkpoint's `quant_method`), as
    "module:class" of an `octavo.plugins.Scheme`; imported when needed."""


@hookspec
def octavo_tool_parsers() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Parsers of calls of tools by name (of `--tool-call-parser`), as "module:class" of an
    `octavo.plugins.ToolParser`; imported when needed."""


@hookspec
def octavo_reasoning_parsers() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Parsers of reasoning by name (of `--reasoning-parser`), as "module:class" of an
    `octavo.plugins.ReasoningParser`; imported when needed."""


@hookspec
def octavo_drafters() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Drafters by name (`method` of `--speculative-config`), as "module:class" of an
    `octavo.plugins.Drafter`, which is called with the `SpeculativeConfig`; imported when needed."""


@hookspec(firstresult=True)
def octavo_model_source(model: str, revision: str | None, cache_dir: Path) -> ModelFiles | None:
    """Turns MODEL into local files, or returns None when it is not this plug-in's to find."""
