"""What the endpoints share: the engine once it is there, and what the server was told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from octavo.core.entry.async_llm import AsyncLLM
from octavo.core.entry.engine_client import EngineDeadError
from octavo.core.entry.formats import AUTO, Formats, choose_formats
from octavo.core.entry.server.errors import ApiError
from octavo.core.entry.server.http import Call
from octavo.core.entry.server.protocol import Body, decode, decode_lenient
from octavo.core.pooling import Task


@dataclass
class ServerState:
    """One server. `served_names` is empty until the model's own name is known.

    api_keys: requests under /v1 and the tokenizer's must bring one of them. body_limit: bytes.
    max_queue: requests that may wait for their first token before more are told to come back.
    lenient: leave out parameters that cannot be honoured instead of refusing them. stall_seconds: how
    long the engine may be at one step; 0: for ever. tool_call_parser, fallback_tool_prompt,
    reasoning_parser: see `choose_formats`.
    """

    llm: AsyncLLM
    served_names: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    allow_credentials: bool = False
    trust_request_chat_template: bool = False
    tool_call_parser: str = AUTO
    fallback_tool_prompt: bool = False
    reasoning_parser: str = AUTO
    body_limit: int = 32 << 20
    max_queue: int | None = None
    lenient: bool = False
    stall_seconds: float = 0.0
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def formats(self) -> Formats:
        """How the model writes calls of tools and reasoning; asked for once the model is loaded.

        Raises:
            ConfigError: the options contradict the model.
        """
        return choose_formats(
            self.llm.get_tokenizer(),
            self.tool_call_parser,
            self.reasoning_parser,
            self.fallback_tool_prompt,
        )

    def ready(self) -> AsyncLLM:
        """The engine, when it takes requests.

        Raises:
            ApiError: a 503 that says why it does not.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        try:
            self.llm.check_health()
        except EngineDeadError as error:
            raise ApiError(503, str(error), code="engine_unavailable") from None
        return self.llm

    def check_health(self) -> None:
        """As `ready`, and the engine must get on.

        Raises:
            ApiError: a 503 that says what is wrong.
        """
        llm = self.ready()
        silent = llm.pulse.silent_seconds
        if 0 < self.stall_seconds < silent:
            raise ApiError(
                503,
                f"the engine finished no step and gave no sign of life for {silent:.0f} s "
                f"(--stall-timeout {self.stall_seconds:g})",
                code="engine_stalled",
            )

    def check_queue(self) -> None:
        """Refuses a request when too many wait already.

        Raises:
            ApiError: a 429.
        """
        queued = self.llm.num_queued
        if self.max_queue is not None and queued >= self.max_queue:
            raise ApiError(
                429,
                f"{queued} requests wait for their first token, and this server lets "
                f"{self.max_queue} wait; try again soon",
                code="queue_full",
            )

    def check_task(self, task: Task) -> None:
        """Refuses what the model served is not for.

        Raises:
            ApiError: a 400 that says why.
        """
        info = self.llm.info
        if task not in info.tasks:
            raise ApiError(400, info.not_a_task, param="model", code="unsupported")

    def decode(self, call: Call, kind: type[Body]) -> Body:
        """The body of a call. A lenient server names in a header what it left out.

        Raises:
            ApiError: a 400 that says what is wrong and names the field.
        """
        if not self.lenient:
            return decode(call.body, kind)
        request, ignored = decode_lenient(call.body, kind)
        if ignored:
            names = ",".join(ignored).encode("ascii", "backslashreplace")
            # A client's own words: nothing in them may end the header.
            names = bytes(c if 0x20 < c < 0x7F else 0x3F for c in names)[:1024]
            call.headers.append((b"x-octavo-ignored", names))
        return request

    def names(self) -> Sequence[str]:
        """The names the model is served by, the first in answers."""
        return self.served_names or (self.llm.model_name,)

    def check_model(self, asked: str | None) -> str:
        """The name to answer with. None asks for whatever is served.

        Raises:
            ApiError: a 404 that lists the names.
        """
        names = self.names()
        if asked is None:
            return names[0]
        if asked not in names:
            raise ApiError(
                404,
                f"the model {asked!r} is not served here; there is {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return asked
