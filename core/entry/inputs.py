"""From what callers write (text, token ids, conversations) to `Request`s the engine can run.

Shared by `LLM`, `AsyncLLM` and the server. All checks that need no engine are made here, before
anything is submitted.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.core.loading.tokenizer import Tokenizer
from octavo.core.params import ParamError, RequestRefused, SamplingParams
from octavo.core.structured import check as check_grammar
from octavo.core.types import Request

log = logging.getLogger("octavo")

Message = Mapping[str, Any]
Conversation = Sequence[Message]
PromptInput = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the two last may carry
"cache_salt"."""

_FROM_GENERATION_CONFIG = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}

_OF_DRAWING = ("temperature", "top_p", "top_k", "min_p")

_TEMPLATE_OPTIONS = {
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "documents",
    "chat_template",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenised. `text` is None when the caller brought ids."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a model's generation_config sets, under our names."""
    return {
        ours: generation_config[theirs]
        for theirs, ours in _FROM_GENERATION_CONFIG.items()
        if generation_config.get(theirs) is not None
    }


def check_cache_salt(salt: str | None) -> None:
    """Refuses a cache salt that is empty, long, or holds a character that separates keys elsewhere.

    Raises:
        ParamError: with param "cache_salt".
    """
    if salt is None:
        return
    if not isinstance(salt, str) or not 1 <= len(salt) <= 128 or set(salt) & set("@/\\\0"):
        raise ParamError(
            "cache_salt",
            f"cache_salt must be 1 to 128 characters without @, /, \\ and NUL, got {salt!r}",
        )


class InputProcessor:
    """Tokenises and checks prompts for one model.

    Args:
        max_model_len: tokens of prompt and output together.
        eos_token_ids: those that the model's configs name; the tokenizer's own is one more.
        max_logprobs: most logprobs a request may ask for; -1: no limit.
        defaults: what `default_params` starts from.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_logprobs: int,
        defaults: Mapping[str, Any],
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        own = tokenizer.eos_token_id  # a chat model's may stand in no other file
        ends = eos_token_ids if own is None or own >= vocab_size else (*eos_token_ids, own)
        self.eos_token_ids = tuple(dict.fromkeys(ends))
        self.max_logprobs = max_logprobs
        self.defaults = dict(defaults)
        self._numbers = itertools.count()

    def default_params(self, **values: Any) -> SamplingParams:
        """The model's own defaults, then `values`. Beams take no default of how to draw."""
        defaults = self.defaults
        if values.get("use_beam_search"):
            defaults = {k: v for k, v in defaults.items() if k not in _OF_DRAWING}
        return SamplingParams(**{**defaults, **values})

    def tokenize(self, prompt: PromptInput, *, add_special_tokens: bool = True) -> Prompt:
        """One prompt in any of the forms of `PromptInput`.

        Raises:
            ParamError: empty, of a wrong type, or with a token id that the model does not have.
        """
        salt = None
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt")
            check_cache_salt(salt)
            prompt = self._from_mapping(prompt)
        if isinstance(prompt, str):
            return Prompt(self.encode(prompt, add_special_tokens), prompt, salt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise ParamError(
                "prompt",
                "a prompt must be text, a list of token ids, {'prompt': text} or "
                f"{{'prompt_token_ids': ids}}, got {type(prompt).__name__}",
            )
        return Prompt(self.check_ids(prompt), None, salt)

    @staticmethod
    def _from_mapping(prompt: Mapping[str, Any]) -> str | Sequence[int]:
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown:
            raise ParamError("prompt", f"a prompt has no field {min(map(str, unknown))!r}")
        for field in ("prompt_token_ids", "prompt"):
            if prompt.get(field) is not None:
                value: str | Sequence[int] = prompt[field]
                return value
        raise ParamError("prompt", "a prompt needs 'prompt' (text) or 'prompt_token_ids'")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, never none.

        Raises:
            ParamError: no token comes of it, or it is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ParamError("prompt", f"the prompt is not valid Unicode: {error}") from None
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise ParamError("prompt", "the prompt is empty: give at least one token")
        if add_special_tokens and self.tokenizer.has_double_bos(ids):
            log.warning(
                "a prompt begins with two BOS tokens: its text already holds one; "
                "send it with add_special_tokens=false"
            )
        return ids

    def check_ids(self, ids: Sequence[Any], param: str = "prompt") -> list[int]:
        """The ids as a list; `param` is what an error names.

        Raises:
            ParamError: none at all, or one that is no token of this model.
        """
        if len(ids) == 0:
            raise ParamError(param, f"{param} is empty: give at least one token")
        top = self.vocab_size
        for token in ids:
            if type(token) is not int or not 0 <= token < top:
                raise ParamError(
                    param,
                    f"{param} has token id {token!r}; this model's ids are 0 to {top - 1}",
                )
        return list(ids)

    def chat(
        self,
        conversation: Conversation,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompt:
        """Renders a conversation with the model's chat template (or the one given).

        The template writes the special tokens, so none are added unless asked for. tools: OpenAI's
        tool definitions, for a template that tells of them.

        Raises:
            ParamError: no conversation, two exclusive options, or a template that refuses.
        """
        if not conversation:
            raise ParamError("messages", "messages must hold at least one message")
        if add_generation_prompt and continue_final_message:
            raise ParamError(
                "continue_final_message",
                "continue_final_message needs add_generation_prompt=false: "
                "the last message is either continued or answered",
            )
        variables = dict(chat_template_kwargs or {})
        if taken := _TEMPLATE_OPTIONS & set(variables):
            raise ParamError(
                "chat_template_kwargs",
                f"chat_template_kwargs may not set {min(taken)!r}: it is a parameter of its own",
            )
        try:
            text = self.tokenizer.render_chat(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **variables,
            )
        except ValueError as error:  # TemplateError among them
            raise ParamError("messages", str(error)) from None
        return Prompt(self.encode(text, add_special_tokens), text)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """A request with an id of its own, its length cut to what fits.

        Raises:
            RequestRefused: the prompt leaves no room in the model's context.
            ParamError: a parameter that this model cannot honour.
        """
        params.check_vocabulary(self.vocab_size)
        self._check_logprobs(params)
        if params.structured_outputs is not None:
            check_grammar(params.structured_outputs)
        check_cache_salt(cache_salt)
        if type(priority) is not int or not -(2**31) <= priority < 2**31:
            raise ParamError(
                "priority", f"priority must be a whole number of 32 bits, got {priority!r}"
            )
        ids = self._truncated(prompt.token_ids, params)
        room = self.max_model_len - len(ids)
        if room < (0 if params.max_tokens == 0 else 1):
            raise RequestRefused(
                "prompt",
                f"the prompt has {len(ids)} tokens; this model's context is {self.max_model_len} "
                "tokens and must hold the prompt and at least one token of output. "
                "Shorten the prompt or set truncate_prompt_tokens",
            )
        if params.max_tokens is None or params.max_tokens > room:
            if params.min_tokens > room:
                raise RequestRefused(
                    "min_tokens",
                    f"min_tokens is {params.min_tokens}, but behind a prompt of {len(ids)} tokens "
                    f"this model's context of {self.max_model_len} has room for {room}",
                )
            params = msgspec.structs.replace(params, max_tokens=room)
        return Request(
            id=str(next(self._numbers)),
            prompt_token_ids=ids,
            params=params,
            eos_token_ids=self.eos_token_ids,
            arrival_time=time.time(),
            priority=priority,
            cache_salt=cache_salt if cache_salt is not None else prompt.cache_salt,
        )

    def _check_logprobs(self, params: SamplingParams) -> None:
        if self.max_logprobs == -1:
            return
        for name, value in (
            ("logprobs", params.logprobs),
            ("prompt_logprobs", params.prompt_logprobs),
        ):
            if value is not None and (value == -1 or value > self.max_logprobs):
                asked = "the whole vocabulary" if value == -1 else str(value)
                raise ParamError(
                    name,
                    f"{name} asks for {asked}; this engine gives at most {self.max_logprobs} "
                    "(option max_logprobs)",
                )

    def _truncated(self, ids: list[int], params: SamplingParams) -> list[int]:
        """The last `truncate_prompt_tokens` ids; -1: as many as leave room for max_tokens."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return ids
        if keep > self.max_model_len:
            raise ParamError(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens is {keep}; this model's context is "
                f"{self.max_model_len} tokens",
            )
        if keep == -1:
            output = 1 if params.max_tokens is None else params.max_tokens
            keep = max(1, self.max_model_len - output)
        return ids[-keep:]
