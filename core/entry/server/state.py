"""What the endpoints share: the engine once it is there, and what the server was told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.entry.async_llm import AsyncLLM
from octavo.core.entry.engine_client import EngineDeadError
from octavo.core.entry.server.errors import ApiError


@dataclass
class ServerState:
    """One server. `served_names` is empty until the model's own name is known.

    api_key: requests under /v1 and the tokenizer's must bring it. body_limit: bytes.
    """

    llm: AsyncLLM
    served_names: Sequence[str] = ()
    api_key: str | None = None
    trust_request_chat_template: bool = False
    body_limit: int = 32 << 20
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

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
