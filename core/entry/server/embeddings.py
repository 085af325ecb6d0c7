"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from octavo.core.entry.async_llm import LONG_PROMPT_CHARACTERS, AsyncLLM
from octavo.core.entry.embedding import (
    EmbeddingFailed,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingParams,
)
from octavo.core.entry.inputs import Prompt, PromptInput
from octavo.core.entry.server.errors import ApiError, bad_request
from octavo.core.entry.server.http import Call
from octavo.core.entry.server.state import ServerState
from octavo.core.params import ParamError

MAX_INPUTS = 2048
"""Inputs of one request, as in OpenAI's API: it is answered as a whole."""


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings. None means "not given"."""

    input: Any
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    # Labels: no effect on the answer.
    user: str | None = None
    request_id: str | None = None


async def embeddings(state: ServerState, call: Call) -> bytes:
    """The endpoint's handler."""
    request = state.decode(call, EmbeddingRequest)
    llm = state.ready()
    model = state.check_model(request.model)
    state.check_task("embed")
    state.check_queue()
    params = PoolingParams(
        dimensions=request.dimensions, truncate_prompt_tokens=request.truncate_prompt_tokens
    )
    prompts = await _prompts(llm, input_list(request.input), params, request)
    call.prompt_tokens = total = sum(len(prompt.token_ids) for prompt in prompts)
    outputs = await _run_all(llm, prompts, params, request)
    encode = _numbers if request.encoding_format in (None, "float") else _base64
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": encode(output.outputs)}
                for i, output in enumerate(outputs)
            ],
            "model": model,
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }
    )


def input_list(given: Any) -> list[PromptInput]:
    """The four forms of `input`: text, texts, token ids, lists of token ids.

    Raises:
        ApiError: a 400 for anything else, for too many of them and for empty ones.
    """
    if isinstance(given, str):
        found: list[PromptInput] = [given]
    elif isinstance(given, list) and given:
        if all(type(item) is int for item in given):
            found = [given]
        elif all(isinstance(item, str) for item in given) or all(
            isinstance(item, list) for item in given
        ):
            found = given
        else:
            raise _unfit(given)
    else:
        raise _unfit(given)
    if len(found) > MAX_INPUTS:
        raise bad_request(
            "input", f"input has {len(found)} items; one request may have {MAX_INPUTS}"
        )
    for i, item in enumerate(found):
        if not item:
            where = "input" if len(found) == 1 else f"input[{i}]"
            raise bad_request(where, f"{where} is empty: give at least one token")
    return found


def _unfit(given: Any) -> ApiError:
    return bad_request(
        "input",
        "input must be text, a list of texts, a list of token ids or a list of such lists, none of "
        f"them empty; got {given!r:.80}",
    )


async def _prompts(
    llm: AsyncLLM, given: Sequence[PromptInput], params: PoolingParams, request: EmbeddingRequest
) -> list[Prompt]:
    """The inputs as token ids, made in a thread where that takes long."""
    special = True if request.add_special_tokens is None else request.add_special_tokens

    def prompts() -> list[Prompt]:
        made = []
        for i, each in enumerate(given):
            try:
                made.append(llm.embedder.prompt(each, params, add_special_tokens=special))
            except ParamError as error:
                where = "input" if len(given) == 1 else f"input[{i}]"
                param = where if error.param == "prompt" else error.param
                raise bad_request(param, str(error)) from None
        return made

    if sum(map(len, given)) < LONG_PROMPT_CHARACTERS:
        return prompts()
    return await asyncio.to_thread(prompts)


async def _run_all(
    llm: AsyncLLM, prompts: Sequence[Prompt], params: PoolingParams, request: EmbeddingRequest
) -> list[EmbeddingRequestOutput]:
    """All outputs, in order. One prompt's failure, or the client's leaving, ends all of them."""
    tasks = [
        asyncio.ensure_future(
            llm.embed(prompt, params, priority=request.priority or 0, cache_salt=request.cache_salt)
        )
        for prompt in prompts
    ]
    try:
        return await asyncio.gather(*tasks)
    except EmbeddingFailed as error:
        raise ApiError(500, str(error), code="embedding_failed") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _numbers(output: EmbeddingOutput) -> list[float]:
    return output.embedding


def _base64(output: EmbeddingOutput) -> str:
    return base64.b64encode(output.data).decode()
