"""GET /v1/capabilities: what this server can do, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from starlette.requests import Request

import octavo
from octavo.core.entry.server.embeddings import EmbeddingRequest
from octavo.core.entry.server.protocol import NEUTRAL, ChatRequest, CompletionRequest
from octavo.core.entry.server.responses_request import ResponsesRequest
from octavo.core.entry.server.state import ServerState
from octavo.plugins.conformance.support import of_capabilities


def capabilities(state: ServerState, request: Request) -> dict[str, Any]:
    """Model, device, limits, and the parameters that are honoured.

    Raises:
        ApiError: a 503 before the model is loaded.
    """
    info = state.ready().info
    return {
        "object": "capabilities",
        "version": octavo.__version__,
        "model": {
            "names": list(state.names()),
            "name": info.name,
            "architecture": info.architecture,
            "vocab_size": info.vocab_size,
            "eos_token_ids": info.eos_token_ids,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "weight_bytes": info.weight_bytes,
            "tasks": info.tasks,
            "embedding": info.embedding,
        },
        "device": {
            "device": info.device,
            "reason": info.device_reason,
            "backend": info.backend,
            "notes": info.notes,
            "capabilities": info.capabilities,
            "support": _support(info.backend, info.device, info.capabilities),
        },
        "kv_cache": {
            "dtype": info.kv_dtype,
            "bytes": info.kv_bytes,
            "blocks": info.num_kv_blocks,
            "block_size": info.block_size,
            "host_bytes": info.host_bytes,
            "host_blocks": info.host_blocks,
            "preemption_mode": info.preemption_mode,
        },
        "limits": {
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "max_logprobs": info.max_logprobs,
            "max_queue": state.max_queue,
            "max_body_bytes": state.body_limit,
        },
        "parameters": {
            "lenient": state.lenient,
            "/v1/chat/completions": honoured(ChatRequest),
            "/v1/completions": honoured(CompletionRequest),
            "/v1/responses": sorted(ResponsesRequest.honoured()),
            "/v1/embeddings": honoured(EmbeddingRequest),
        },
    }


def _support(backend: str, device: str, told: Mapping[str, Any]) -> dict[str, Any] | None:
    """The device's row as docs/support-matrix.md has it; None where an engine tells no capabilities."""
    if not told:
        return None
    row = asdict(of_capabilities(backend, device, told))
    checks = ("passed", "failed", "not_offered", "version")  # a server runs no checks
    return {name: value for name, value in row.items() if name not in checks}


def honoured(kind: Any) -> list[str]:
    """The fields of a request that have an effect, or are labels."""
    return [name for name in kind.__struct_fields__ if name not in NEUTRAL]
