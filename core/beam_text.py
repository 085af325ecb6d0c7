"""The text of beams, which stop strings may end: kept in the engine, for requests that have such.

Who reads the engine's output looks for stop strings, as a rule. Of beams it sees only what was found, so
the search itself has to know where a text ends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from octavo.core.detokenizer import Detokenizer
from octavo.core.stop import StopChecker

if TYPE_CHECKING:
    from octavo.core.loading.tokenizer import Tokenizer
    from octavo.core.types import Request


class BeamText:
    """What a beam's text may still make of a stop string. It does not change: `after` makes a child's.

    matched: the stop string that its last token completed.
    """

    __slots__ = ("_count", "_detokenizer", "_min_tokens", "_stops", "matched")

    def __init__(self, detokenizer: Detokenizer, stops: StopChecker, min_tokens: int) -> None:
        self._detokenizer, self._stops = detokenizer, stops
        self._min_tokens = min_tokens
        self._count = 0
        self.matched: str | None = None

    @classmethod
    def of(cls, request: Request, tokenizer: Tokenizer) -> BeamText:
        """Before the first token of a request's output."""
        params = request.params
        return cls(
            Detokenizer.of(
                tokenizer, request.prompt_token_ids, params, shown_special=request.shown_special
            ),
            StopChecker(params.stops),
            params.min_tokens,
        )

    def after(self, token: int) -> BeamText:
        """With one token more."""
        child = copy.copy(self)
        child._detokenizer = self._detokenizer.fork()
        child._stops = copy.copy(self._stops)
        child._count += 1
        _, child.matched = child._stops.push(
            child._detokenizer.push([token]), check=child._count > self._min_tokens
        )
        return child


class BeamTexts:
    """Begins the texts of beams.

    load: loads the model's tokenizer; called once, on a thread of its own, for the first such request.
    """

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._tokenizer: Tokenizer | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="beam texts")

    def ready(self, also: Future[Any] | None = None) -> Future[None]:
        """Done when `begin` can be called, and `also` is done; fails as that does."""
        return self._pool.submit(self._prepare, also)

    def _prepare(self, also: Future[Any] | None) -> None:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        if also is not None:
            also.result()

    def begin(self, request: Request) -> BeamText:
        """The empty text of a request's first beam."""
        assert self._tokenizer is not None, "the request was not held until `ready`"
        return BeamText.of(request, self._tokenizer)

    def close(self) -> None:
        """Ends the thread; what it is at is finished."""
        self._pool.shutdown(wait=False, cancel_futures=True)
