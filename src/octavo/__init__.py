"""Octavo: an LLM inference and serving engine with plug-in hardware backends.

Importing this package imports no torch: the names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from octavo.core.entry.async_llm import AsyncLLM
    from octavo.core.entry.beam_search import BeamSearchOutput, BeamSearchParams
    from octavo.core.entry.embedding import EmbeddingOutput, EmbeddingRequestOutput, PoolingParams
    from octavo.core.entry.llm import LLM
    from octavo.core.params import SamplingParams
    from octavo.core.types import RequestOutput

_LAZY = {
    "LLM": "octavo.core.entry.llm",
    "AsyncLLM": "octavo.core.entry.async_llm",
    "SamplingParams": "octavo.core.params",
    "RequestOutput": "octavo.core.types",
    "BeamSearchOutput": "octavo.core.entry.beam_search",
    "BeamSearchParams": "octavo.core.entry.beam_search",
    "EmbeddingOutput": "octavo.core.entry.embedding",
    "EmbeddingRequestOutput": "octavo.core.entry.embedding",
    "PoolingParams": "octavo.core.entry.embedding",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
