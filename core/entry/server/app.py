"""The routes, and the error bodies of what reaches none of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import octavo
from octavo.core.entry.server.access import Access, ApiKey
from octavo.core.entry.server.capabilities import capabilities
from octavo.core.entry.server.chat import chat_completions, render_tokenize
from octavo.core.entry.server.completions import completions
from octavo.core.entry.server.embeddings import embeddings
from octavo.core.entry.server.errors import ApiError, as_api_error, bad_request, for_status
from octavo.core.entry.server.http import Answer, Call, Endpoint, error_headers
from octavo.core.entry.server.metrics import Metrics
from octavo.core.entry.server.openapi import document
from octavo.core.entry.server.protocol import DetokenizeRequest, TokenizeRequest
from octavo.core.entry.server.responses import responses
from octavo.core.entry.server.state import ServerState
from octavo.core.entry.server.tools import checked_tools

_EXPOSED = ("x-request-id", "x-octavo-ignored", "retry-after")


def build_app(state: ServerState) -> ASGIApp:
    """The ASGI app. It can be served before the model is loaded: /health is 503 until then."""

    def post(path: str, handler: Callable[[ServerState, Call], Awaitable[Answer]]) -> Route:
        async def bound(call: Call) -> Answer:
            return await handler(state, call)

        return Route(path, Endpoint(path, bound, state.body_limit), methods=["POST"])

    def get(path: str, make: Callable[[ServerState, Request], Any]) -> Route:
        async def endpoint(request: Request) -> Response:
            request.scope["octavo"].route = path
            return _json(make(state, request))

        return Route(path, endpoint, methods=["GET"])

    metrics = Metrics(state.llm)

    async def show_metrics(request: Request) -> Response:
        request.scope["octavo"].route = "/metrics"
        text = await metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def show_document(request: Request) -> Response:
        request.scope["octavo"].route = "/openapi.json"
        return Response(document(), media_type="application/json")

    starlette = Starlette(
        routes=[
            post("/v1/chat/completions", chat_completions),
            post("/v1/completions", completions),
            post("/v1/responses", responses),
            post("/v1/embeddings", embeddings),
            post("/tokenize", _tokenize),
            post("/detokenize", _detokenize),
            get("/v1/models", _models),
            get("/v1/models/{name:path}", _model),
            get("/v1/capabilities", capabilities),
            get("/health", _health),
            get("/ping", _health),
            get("/version", _version),
            Route("/metrics", show_metrics, methods=["GET"]),
            Route("/openapi.json", show_document, methods=["GET"]),
        ],
        exception_handlers={
            ApiError: _on_error,
            HTTPException: _on_http_exception,
            Exception: _on_error,
        },
    )
    starlette.router.redirect_slashes = False
    app: ASGIApp = starlette
    if state.api_keys:
        app = ApiKey(app, state.api_keys)
    if state.allowed_origins:  # outside the key: a browser asks first, and without it
        app = CORSMiddleware(
            app,
            allow_origins=state.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_credentials=state.allow_credentials,
            expose_headers=_EXPOSED,
        )
    return Access(app, metrics.responses)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    result = for_status(error.status_code, request.url.path, request.method)
    return Response(
        result.body(), result.status, dict(error.headers or {}), media_type="application/json"
    )


async def _on_error(request: Request, error: Exception) -> Response:
    result = as_api_error(error)
    headers = {name.decode(): value.decode() for name, value in error_headers(result)}
    return Response(result.body(), result.status, headers, media_type="application/json")


def _health(state: ServerState, request: Request) -> Any:
    state.check_health()
    return {}


def _version(state: ServerState, request: Request) -> Any:
    return {"version": octavo.__version__}


def _model_card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "octavo",
        "root": state.llm.config.model,
        "max_model_len": state.llm.info.max_model_len,
    }


def _models(state: ServerState, request: Request) -> Any:
    state.ready()
    return {"object": "list", "data": [_model_card(state, name) for name in state.names()]}


def _model(state: ServerState, request: Request) -> Any:
    state.ready()
    name = request.path_params["name"]
    return _model_card(state, state.check_model(name))


async def _tokenize(state: ServerState, call: Call) -> bytes:
    request = state.decode(call, TokenizeRequest)
    llm = state.ready()
    state.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("prompt", "give either prompt or messages")
    checked_tools(request.tools)
    if request.messages is not None:
        ids = (await render_tokenize(state, request)).token_ids
    else:
        special = True if request.add_special_tokens is None else request.add_special_tokens
        ids = llm.get_tokenizer().encode(request.prompt or "", add_special_tokens=special)
    result: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": llm.info.max_model_len,
        "tokens": ids,
    }
    if request.return_token_strs:
        text = llm.get_tokenizer().token_text
        result["token_strs"] = [text(token) for token in ids]
    return msgspec.json.encode(result)


async def _detokenize(state: ServerState, call: Call) -> bytes:
    request = state.decode(call, DetokenizeRequest)
    llm = state.ready()
    state.check_model(request.model)
    if request.tokens:
        llm.inputs.check_ids(request.tokens, "tokens")
    text = llm.get_tokenizer().decode(request.tokens, skip_special_tokens=False)
    return msgspec.json.encode({"prompt": text})
