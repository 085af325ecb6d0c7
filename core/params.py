"""What a request may ask for: sampling parameters, and their checks. Imports no torch."""

from __future__ import annotations

import difflib
import math
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec

STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_CHOICES = 4096
"""Texts in `StructuredOutputsParams.choice`."""


_OF_DRAWING: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "seed": (None,),
}  # fmt: skip

MAX_LOGPROBS = 1 << 20
"""Upper bound on `logprobs`; -1 asks for the whole vocabulary."""


class RequestOutputKind(IntEnum):
    """What a streaming caller receives: all text so far, only what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class ParamError(ValueError):
    """A request parameter that cannot be used; `param` names it as the caller wrote it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.param, str(self))


class RequestRefused(ParamError):
    """A request that could never run here. The message gives what it needs and what there is."""


def _finite(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    bad = isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
    if bad or value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        span = f"in {bracket}{low:g}, {high:g}]" if high < 1e30 else f"of at least {low:g}"
        raise ParamError(name, f"{name} must be a number {span}, got {value!r}")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ParamError(name, f"{name} must be a whole number in [{low}, {high}], got {value!r}")


def _typed(name: str, value: object, kinds: type | tuple[type, ...], what: str) -> None:
    if not isinstance(value, kinds):
        raise ParamError(name, f"{name} must be {what}, got {value!r}")


if TYPE_CHECKING:
    _NamesUnknown = msgspec.StructMeta
else:

    class _NamesUnknown(msgspec.StructMeta):
        """A keyword that is no field becomes an error that names the nearest one."""

        def __call__(cls, *args: Any, **values: Any) -> Any:
            for name in values:
                if name not in cls.__struct_fields__:
                    close = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
                    hint = f" (did you mean {close[0]!r}?)" if close else ""
                    raise ParamError(name, f"{name} is not a sampling parameter here{hint}")
            return super().__call__(*args, **values)


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=_NamesUnknown
):
    """What an answer's text has to be: exactly one of the first five. Names are vLLM's.

    Attributes:
        json: a JSON schema, as text or as data; json_object: any JSON object.
        regex: a regular expression (Rust's, which has no look-around) for the whole text.
        choice: the texts of which it is to be one.
        grammar: a context-free grammar, in Lark's form or as llama.cpp writes EBNF.
        disable_any_whitespace: of JSON, no white space between its parts.
        whitespace_pattern: of JSON, a regular expression for what may stand between them.
        preamble: rules in Lark's form of which `preamble` is text in front of it: what a reasoning
            model thinks first.
        alternative: a grammar in Lark's form that the text may follow instead: calls of tools.

    Raises:
        ParamError: none or several of them, or a value of a wrong type.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    preamble: str | None = None
    alternative: str | None = None

    def __post_init__(self) -> None:
        name = "structured_outputs"
        given = [k for k in STRUCTURED_KINDS if getattr(self, k) not in (None, *self._off(k))]
        if len(given) != 1:
            have = f"got {', '.join(given)}" if given else "got none"
            raise ParamError(name, f"{name} needs one of {', '.join(STRUCTURED_KINDS)}; {have}")
        for part in ("regex", "grammar", "whitespace_pattern", "preamble", "alternative"):
            if (value := getattr(self, part)) is not None:
                _typed(f"{name}.{part}", value, str, "text")
        if self.json is not None:
            _typed(f"{name}.json", self.json, (str, dict, bool), "a JSON schema")
        if self.choice is not None:
            _typed(f"{name}.choice", self.choice, (list, tuple), "a list")
            if not 1 <= len(self.choice) <= MAX_CHOICES:
                raise ParamError(
                    f"{name}.choice",
                    f"{name}.choice must hold 1 to {MAX_CHOICES} texts, has {len(self.choice)}",
                )
            for word in self.choice:
                if not isinstance(word, str) or not word:
                    raise ParamError(
                        f"{name}.choice", f"{name}.choice must hold non-empty texts, got {word!r}"
                    )
        if (
            self.disable_any_whitespace or self.whitespace_pattern is not None
        ) and self.kind not in (
            "json",
            "json_object",
        ):
            raise ParamError(
                name, f"{name}: white space can be set for JSON only, not for {self.kind}"
            )

    @staticmethod
    def _off(kind: str) -> tuple[bool, ...]:
        return (False,) if kind == "json_object" else ()

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(k for k in STRUCTURED_KINDS if getattr(self, k) not in (None, *self._off(k)))


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=_NamesUnknown
):
    """How tokens are chosen and when a sequence ends. Names and defaults are vLLM's.

    Raises:
        ParamError: an unknown parameter or a value outside its range, with the name in `param`.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        self._check_types()
        _whole("n", self.n, 1, 1024)
        self._check_search()
        _finite("presence_penalty", self.presence_penalty, -2, 2)
        _finite("frequency_penalty", self.frequency_penalty, -2, 2)
        # A smaller one takes logits beyond what float32 holds.
        _finite("repetition_penalty", self.repetition_penalty, 1e-30, 1e30)
        _finite("temperature", self.temperature, 0, 1e30)
        _finite("top_p", self.top_p, 0, 1, open_low=True)
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        _finite("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamError(
                "min_tokens",
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _whole(name, value, -1, MAX_LOGPROBS)
        if self.truncate_prompt_tokens is not None:
            _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1)
            if self.truncate_prompt_tokens == 0:
                raise ParamError(
                    "truncate_prompt_tokens",
                    "truncate_prompt_tokens must be -1 (the model's context) or at least 1, got 0",
                )
        for name, words in (("stop", self.stops), ("bad_words", self.bad_words or [])):
            if any(not isinstance(w, str) or not w for w in words):
                raise ParamError(name, f"{name} must hold non-empty strings, got {words!r}")
            if any("\ud800" <= character <= "\udfff" for w in words for character in w):
                raise ParamError(name, f"{name} has half a surrogate pair, which no text can hold")
        if self.stops and not self.detokenize:
            raise ParamError(
                "stop", "stop strings need detokenize=True; use stop_token_ids instead"
            )
        for token, bias in (self.logit_bias or {}).items():
            number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
            if not number or not -100 <= bias <= 100:
                raise ParamError(
                    "logit_bias",
                    f"logit_bias values must be numbers in [-100, 100]; token {token} has {bias!r}",
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParamError("allowed_token_ids", "allowed_token_ids must not be empty")

    def _check_search(self) -> None:
        if self.best_of is not None:
            _whole("best_of", self.best_of, 1, 1024)
            if self.best_of < self.n:
                raise ParamError(
                    "best_of", f"best_of ({self.best_of}) must be at least n ({self.n})"
                )
        _finite("length_penalty", self.length_penalty, -1e3, 1e3)
        _typed("use_beam_search", self.use_beam_search, bool, "True or False")
        if type(self.early_stopping) is not bool and self.early_stopping != "never":
            raise ParamError(
                "early_stopping",
                f"early_stopping must be true, false or 'never', got {self.early_stopping!r}",
            )
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise ParamError(name, f"{name} needs use_beam_search=true")
            return
        for name, nothing in _OF_DRAWING.items():
            if (value := getattr(self, name)) not in nothing:
                raise ParamError(
                    name,
                    f"{name} says how tokens are drawn, and beams are not drawn but searched for: "
                    f"leave {name}={value!r} out, or use_beam_search",
                )

    @property
    def width(self) -> int:
        """Sequences that run for one prompt: beams, or samples of which the n best are returned."""
        return self.best_of or self.n

    def _check_types(self) -> None:
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            _typed(name, getattr(self, name), bool, "True or False")
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
            if (value := getattr(self, name)) is not None:
                _typed(name, value, (list, tuple), "a list")
        if self.stop is not None:
            _typed("stop", self.stop, (str, list, tuple), "a string or a list of strings")
        if self.logit_bias is not None:
            _typed("logit_bias", self.logit_bias, dict, "a dict of token ids and biases")
        if self.structured_outputs is not None:
            _typed(
                "structured_outputs",
                self.structured_outputs,
                StructuredOutputsParams,
                "StructuredOutputsParams",
            )
            if self.ignore_eos:
                raise ParamError(
                    "ignore_eos", "ignore_eos contradicts structured_outputs, which ends by EOS"
                )
        _typed("output_kind", self.output_kind, RequestOutputKind, "a RequestOutputKind")

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses token ids that this model does not have.

        Raises:
            ParamError: an id in logit_bias, stop_token_ids or allowed_token_ids outside [0, vocab_size).
        """
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            for token in ids:
                if (
                    isinstance(token, bool)
                    or not isinstance(token, int)
                    or not 0 <= token < vocab_size
                ):
                    raise ParamError(
                        name,
                        f"{name} has token id {token!r}; this model's ids are 0 to {vocab_size - 1}",
                    )
