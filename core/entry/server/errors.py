"""Errors as the OpenAI client expects them: always `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from octavo.core.entry.engine_client import EngineDeadError
from octavo.core.params import ParamError


class ApiError(Exception):
    """An answer that is an error. `param` names the request's field at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        """The class of error, in OpenAI's words."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        """The JSON body; also the data of a server-sent event once the answer has begun."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def unsupported(name: str, why: str | None = None) -> ApiError:
    """A 400 for a field that nothing here implements."""
    what = (
        f"{name} is not supported by this server; leave it out" if why is None else f"{name}: {why}"
    )
    return bad_request(name, what, "unsupported")


def refuse_unsupported(
    request: msgspec.Struct,
    neutral: Mapping[str, tuple[Any, ...]],
    why: Mapping[str, str] | None = None,
) -> None:
    """Refuses fields without an implementation that hold none of the values which ask for nothing.

    why: what is said of a field, where there is more to say than that it is not supported.

    Raises:
        ApiError: a 400 that names the field.
    """
    for name, values in neutral.items():
        value = getattr(request, name, None)
        # Of one type, too, where Python takes True for 1.
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            raise unsupported(name, (why or {}).get(name))


def as_api_error(error: Exception) -> ApiError:
    """What a failed request answers with. Bugs answer 500 with the exception's name, no traceback."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ParamError):
        return bad_request(error.param, str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_unavailable")
    return ApiError(500, f"internal error: {type(error).__name__}: {error}")


def for_status(status: int, path: str, method: str) -> ApiError:
    """The router's own errors: no such route, wrong method."""
    if status == 404:
        return ApiError(404, f"there is nothing at {path}", code="not_found")
    if status == 405:
        return ApiError(405, f"{path} does not take {method}", code="method_not_allowed")
    return ApiError(status, HTTPStatus(status).phrase)
