"""Who answers in a chat: the engine in this process, or an OpenAI-compatible server.

The server is spoken to with the standard library alone: one POST whose answer is read line by line
needs no HTTP client with pools and retries, and `octavo chat --url` starts at once.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from octavo.core.config import ConfigError
from octavo.core.entry.cli.failure import CommandFailed

if TYPE_CHECKING:
    from octavo.core.entry.llm import LLM

Message = dict[str, str]
Values = Mapping[str, Any]
_TIMEOUT = 600.0
_LONGEST_EVENT = 16 << 20


@dataclass(slots=True)
class Piece:
    """What is new of an answer. Counts are of the whole answer so far; None: not known."""

    text: str
    tokens: int
    prompt_tokens: int | None = None
    finish_reason: str | None = None


class Partner(Protocol):
    """One side of a chat."""

    name: str
    interruptible: bool
    """Ctrl-C may break into it anywhere; else it is asked to stop between two pieces."""

    def answer(self, messages: Sequence[Message], values: Values) -> Iterator[Piece]:
        """Streams an answer; closing the iterator ends it.

        Raises:
            ParamError, ConfigError: what was asked cannot be answered.
            CommandFailed: it went wrong.
        """

    def facts(self) -> list[tuple[str, str]]:
        """What /stats tells of it."""


class LocalPartner:
    """The engine in this process."""

    interruptible = False  # an engine left in the middle of a step could not be used again

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.name = llm.info.name

    def answer(self, messages: Sequence[Message], values: Values) -> Iterator[Piece]:
        """See `Partner`."""
        prompt = self._llm.render_chat(messages)
        params = self._llm.get_default_sampling_params(**{"max_tokens": None, **values})
        tokens = 0
        with contextlib.closing(self._llm.stream(prompt, params)) as outputs:  # type: ignore[type-var]
            for output in outputs:
                [sample] = output.outputs
                tokens += len(sample.token_ids)
                if sample.finish_reason == "error":
                    raise CommandFailed(f"generation failed: {sample.stop_reason}")
                yield Piece(sample.text, tokens, len(prompt.token_ids), sample.finish_reason)

    def facts(self) -> list[tuple[str, str]]:
        """See `Partner`."""
        info = self._llm.info
        return [
            ("model", f"{info.name}, {info.numbers}"),
            ("device", f"{info.device} ({info.device_reason})"),
            ("context", f"{info.max_model_len} tokens"),
        ]


class RemotePartner:
    """A model behind `url` (…/v1). Without a name it is the first that the server lists.

    Raises:
        ConfigError: there is no such server or model.
    """

    interruptible = True

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r} is no address as http://127.0.0.1:8000/v1")
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "User-Agent": "octavo-chat"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        # No proxy reaches this machine's own ports better than this process.
        here = parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127.")
        proxies = [urllib.request.ProxyHandler({})] if here else []
        self._opener = urllib.request.build_opener(*proxies)
        self.name = model or self._first_model()

    def _first_model(self) -> str:
        with self._open("/models", None) as response:
            listed = response.read()
        try:
            names = [entry["id"] for entry in json.loads(listed)["data"]]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{self._url}/models lists no models: is this an OpenAI-compatible API? "
                "Its address usually ends in /v1"
            ) from None
        if not names:
            raise ConfigError(f"{self._url} serves no model")
        return str(names[0])

    def _open(self, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return self._opener.open(request, timeout=_TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                said = _message(error.read(1 << 20)) or error.reason
            hint = "; the address usually ends in /v1" if error.code == 404 else ""
            hint = "; give the key with --api-key" if error.code == 401 else hint
            kind = ConfigError if error.code < 500 else CommandFailed
            raise kind(f"{self._url} answers {error.code}: {said}{hint}") from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"{self._url} cannot be reached: {reason}") from None

    def answer(self, messages: Sequence[Message], values: Values) -> Iterator[Piece]:
        """See `Partner`."""
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **values,
        }
        tokens, prompt_tokens = 0, None
        with self._open("/chat/completions", body) as response:
            for event in _events(response):
                if usage := event.get("usage"):
                    tokens = usage.get("completion_tokens", tokens)
                    prompt_tokens = usage.get("prompt_tokens")
                text, reason = "", None
                for choice in event.get("choices") or ():
                    text += (choice.get("delta") or {}).get("content") or ""
                    reason = choice.get("finish_reason")
                tokens += bool(text) and not usage  # a chunk is mostly a token
                yield Piece(text, tokens, prompt_tokens, reason)

    def facts(self) -> list[tuple[str, str]]:
        """See `Partner`."""
        return [("model", self.name), ("server", self._url)]


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events up to [DONE].

    Raises:
        CommandFailed: an event that is an error, or a stream that breaks off.
    """
    try:
        while line := response.readline(_LONGEST_EVENT):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise CommandFailed(_message(data) or "the server failed")
            yield event
    except (OSError, ValueError) as error:
        raise CommandFailed(f"the answer broke off: {error}") from None


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace").strip()[:300]
