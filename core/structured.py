"""Structured output: grammars that a request's tokens have to follow.

llguidance does the work: it has no dependencies, compiles a schema in well under a millisecond as a
rule, computes a mask of allowed tokens in some tens of microseconds, bounds the work of both by "fuel",
and can take tokens back. Others were looked at: xgrammar brings transformers and Triton with it.

A grammar is checked where a request comes in (`check`), so a bad one never reaches the engine; there it
is compiled beside the steps (`Grammars`), once for all requests that have the same, and every sequence
follows it with a state of its own (`GrammarState`).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from octavo.core.params import ParamError, StructuredOutputsParams
from octavo.core.types import Int32, Int64

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from octavo.core.sequence import Ahead
    from octavo.core.sequence import Sequence as Seq

PARAM = "structured_outputs"
MAX_BYTES = 1 << 18
"""Of a grammar's text. Compiling one of this size takes about two seconds, beside the steps."""
_KEPT = 128  # compiled grammars
_CHECKS = 500  # parts of a bad schema that are looked at to find the place

# Where a schema holds further schemas: one, a list of them, or one for each name.
_ONE = ("items", "additionalProperties", "contains", "propertyNames", "if", "then", "else", "not")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own form, with what may stand in front or in its place.

    Raises:
        ParamError: it is too large, or no JSON where JSON is meant.
    """
    text = _body(params)
    if params.preamble is None and params.alternative is None:
        return text
    try:
        grammars = json.loads(text)["grammars"]
    except ValueError:  # plain Lark
        grammars = [{"lark_grammar": text}]
    grammars[0]["name"] = "body"
    choice, first = "@body", ""
    if params.alternative is not None:
        choice = "@body | @alternative"
        lark = _bounded(params.alternative, "alternative")
        grammars.append({"name": "alternative", "lark_grammar": lark})
    if params.preamble is not None:
        first = "preamble "
    top = f"start: {first}rest\nrest: {choice}\n{params.preamble or ''}"
    return json.dumps({"grammars": [{"name": "top", "lark_grammar": top}, *grammars]})


def _body(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher, grammar_from

    options: JsonCompileOptions = {}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    if params.json is not None:
        return LLMatcher.grammar_from_json_schema(_schema(params.json), overrides=options)
    if params.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=options)
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(_bounded(params.regex, "regex"))
    if params.choice is not None:
        words = [_bounded(word, "choice") for word in params.choice]
        _bounded("".join(words), "choice")
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
        )
    assert params.grammar is not None
    text = _bounded(params.grammar, "grammar")
    try:  # EBNF as llama.cpp writes it, or Lark
        return grammar_from("grammar", text) if "::=" in text else LLMatcher.grammar_from_lark(text)
    except Exception as error:  # its parser raises what it likes
        raise ParamError(
            f"{PARAM}.grammar", f"the grammar cannot be read: {_first(str(error))}"
        ) from None


def _bounded(text: str, name: str) -> str:
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_BYTES:
        raise ParamError(
            f"{PARAM}.{name}", f"{name} has {size:,} bytes; at most {MAX_BYTES:,} are taken"
        )
    return text


def _schema(schema: str | dict[str, Any] | bool) -> str:
    text = _bounded(schema if isinstance(schema, str) else json.dumps(schema), "json")
    try:
        made = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParamError(f"{PARAM}.json", f"the schema is not valid JSON: {error}") from None
    if made is True:  # the schema of anything
        return "{}"
    if not isinstance(made, dict):
        what = "false, which allows no text" if made is False else f"{made!r:.40}"
        raise ParamError(f"{PARAM}.json", f"a JSON schema must be an object or true, got {what}")
    return text


def check(params: StructuredOutputsParams) -> None:
    """Refuses a grammar that cannot be used. Takes up to some seconds for the largest ones, the first
    time: not for a thread that others wait for.

    Raises:
        ParamError: a message that names the place.
    """
    _check(msgspec.msgpack.encode(params))


@lru_cache(_KEPT)
def _check(packed: bytes) -> None:
    from llguidance import LLMatcher

    params = msgspec.msgpack.decode(packed, type=StructuredOutputsParams)

    failed, problems = LLMatcher.validate_grammar_with_warnings(grammar_text(params))
    if not failed:
        return
    kind, reason = params.kind, problems[0].strip()
    if kind == "json":
        schema = json.loads(_schema(params.json))  # type: ignore[arg-type]  # kind says it is there
        place = "#" + _place(schema)
        reason = f"at {place}: {reason}"
    raise ParamError(f"{PARAM}.{kind}", f"the {kind} cannot be used: {reason}")


def _place(schema: Any) -> str:
    """JSON pointer of the smallest part of a bad schema that is bad on its own."""
    from llguidance import LLMatcher

    shared = (
        {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        if isinstance(schema, dict)
        else {}
    )
    pointer, part, checks = "", schema, 0
    while True:
        for step, child in _parts(part):
            checks += 1
            if checks > _CHECKS:
                return pointer
            alone = (
                {**shared, **child} if isinstance(child, dict) and "/$defs" not in step else child
            )
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(alone))
            if LLMatcher.validate_grammar_with_warnings(grammar)[0]:
                pointer, part = pointer + step, child
                break
        else:
            return pointer


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for name in _ONE:
        if isinstance(schema.get(name), (dict, bool)):
            yield f"/{name}", schema[name]
    for name in _LISTS:
        if isinstance(parts := schema.get(name), list):
            yield from ((f"/{name}/{i}", part) for i, part in enumerate(parts))
    for name in _NAMED:
        if isinstance(parts := schema.get(name), dict):
            for key, part in parts.items():
                yield f"/{name}/{key.replace('~', '~0').replace('/', '~1')}", part


def _first(text: str) -> str:
    return text.strip().partition("\n")[0]


# ---------------------------------------------------------------------------------- in the engine


class _Vocabulary:
    """The vocabulary as llguidance reads it.

    encode: text -> ids, for its own look ahead.
    """

    is_tokenizer_wrapper = True

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Sequence[int],
        eos: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        # 0xff cannot begin text: so a special token's spelling never stands for text.
        marked = set(special)
        self.tokens = [b"\xff" + t if i in marked else t for i, t in enumerate(tokens)]
        self.special_token_ids = list(special)
        self.eos_token_id = eos
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def make_tokenizer(
    tokens: Sequence[bytes],
    special: Sequence[int],
    eos: Sequence[int],
    encode: Callable[[str], list[int]],
) -> LLTokenizer:
    """llguidance's view of a vocabulary with one entry for each of the model's logits.

    Args:
        tokens: the bytes of each token; b"" where there is none.
        special: ids of the tokens that are no text; eos: those that end an answer.
    """
    from llguidance import LLTokenizer

    ends = list(eos) or [len(tokens) - 1]
    made = _Vocabulary(tokens, special, ends[0], encode)
    return LLTokenizer(made, n_vocab=len(tokens), eos_token=ends)  # type: ignore[arg-type]  # duck-typed


class Grammars:
    """Compiles grammars on a thread of their own, and keeps the latest.

    tokenizer: makes llguidance's view of the vocabulary; called once, on that thread.
    """

    def __init__(self, tokenizer: Callable[[], LLTokenizer], vocab_size: int) -> None:
        self._make_tokenizer = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Future[LLMatcher]] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def compile(self, params: StructuredOutputsParams) -> Future[LLMatcher]:
        """The compiled grammar, now or soon. The result is a prototype: whoever uses it copies it."""
        key = msgspec.msgpack.encode(params)
        with self._lock:
            future = self._known.get(key)
            if future is None or (future.done() and future.exception() is not None):
                future = self._known[key] = self._pool.submit(self._compile, params)
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return future

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        from llguidance import LLMatcher

        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        matcher = LLMatcher(self._tokenizer, grammar_text(params), log_level=0)
        if matcher.is_error():
            raise ParamError(PARAM, f"the grammar cannot be used: {matcher.get_error()}")
        return matcher

    def state(self, params: StructuredOutputsParams) -> GrammarState:
        """A state at the grammar's beginning. Waits for its compilation, which is over as a rule."""
        return GrammarState(self.compile(params).result().deep_copy(), self.vocab_size)

    def close(self) -> None:
        """Ends the thread; what it is at is finished."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class GrammarState:
    """How far one sequence has followed its grammar.

    words: of 32 bits, in a mask. consumed: output tokens that it has taken. settled: the one token that was
    possible where `take` was last called, or -1 if there were others.
    """

    __slots__ = ("_matcher", "consumed", "settled", "words")

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self.consumed, self.settled = 0, -1
        self.words = -(-vocab_size // 32)

    def fork(self) -> GrammarState:
        """A state as far as this one."""
        other = GrammarState.__new__(GrammarState)
        other._matcher = self._matcher.deep_copy()
        other.consumed, other.settled, other.words = self.consumed, self.settled, self.words
        return other

    def advance(self, sequence: Seq | Ahead) -> None:
        """Takes the output tokens since the last call, or gives back those that are there no more."""
        if sequence.num_output == self.consumed:
            return
        if sequence.num_output < self.consumed:
            self._matcher.rollback(self.consumed - sequence.num_output)
            self.consumed = sequence.num_output
        start = sequence.num_prompt + self.consumed
        if start < sequence.num_tokens:
            self._matcher.consume_tokens(sequence.tokens[start : sequence.num_tokens].tolist())
            self.consumed = sequence.num_output

    def take(self, token: int) -> bool:
        """Goes on by one token if it is one that `mask` would leave, and else stays where it is. Costs a
        fraction of a mask. No token (-1) is never taken."""
        matcher = self._matcher
        # Text that the grammar settles is spelled in one way only: so has a mask it.
        forced = matcher.compute_ff_tokens()
        self.settled = forced[0] if forced else -1
        if token < 0 or (forced and forced[0] != token):
            return False
        if matcher.try_consume_tokens([token]) != 1:
            return False
        self.consumed += 1
        return True

    def mask(self) -> Int32:
        """Which tokens may come next, a bit each: int32 [ceil(V / 32)]. No bit where none may.

        An error (its work went beyond what is allowed) leaves no bit either.
        """
        words: Int32 = masks([self])[0]
        return words

    def fill(self, words: Int32, address: int) -> None:
        """The same, into contiguous memory at `address`, of which `words` is the array."""
        self._matcher.unsafe_compute_mask_ptr(address, words.nbytes)
        if self._matcher.is_error():
            words[:] = 0

    @property
    def error(self) -> str:
        """Why it can go no further; empty if it can."""
        return self._matcher.get_error() if self._matcher.is_error() else ""


def masks(states: Sequence[GrammarState]) -> Int32:
    """The masks of one or more states of one vocabulary: int32 [R, ceil(V / 32)]."""
    made = np.empty((len(states), states[0].words), np.int32)
    address, stride = made.ctypes.data, made.strides[0]
    for i, state in enumerate(states):
        state.fill(made[i], address + i * stride)
    return made


def allows(mask: Int32, token: int) -> bool:
    """Whether a mask leaves this token."""
    return bool(int(mask[token // 32]) >> token % 32 & 1)


def only(mask: Int32, ids: Int64) -> bool:
    """Whether a mask leaves none but the tokens `ids` [N]."""
    rest = mask.view(np.uint32).copy()
    np.bitwise_and.at(rest, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    return not rest.any()
