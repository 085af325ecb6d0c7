"""Structured output through the whole engine: what is drawn always follows the grammar."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from byte_model import EOS, byte_llama
from tiny_models import engine, run, tokens_of

from octavo.backends.cpu.ops import CpuOps
from octavo.core import structured
from octavo.core.contract import Ops
from octavo.core.params import STRUCTURED_KINDS, ParamError, SamplingParams, StructuredOutputsParams
from octavo.core.structured import Grammars, GrammarState, check
from octavo.core.types import Request

pytestmark = pytest.mark.usefixtures("one_thread")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [1, 23, 456]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def decode(folder: Path) -> Any:
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda tokens: made.decode(list(tokens))


def asked(name: str, seed: int = 0, count: int = 90, **params: Any) -> Request:
    spec = {k: params.pop(k) for k in list(params) if k in STRUCTURED_KINDS}
    values = {"temperature": 1.0, "seed": seed, "max_tokens": count, **params}
    return Request(
        id=name,
        prompt_token_ids=[5, 9, seed % 200, 7],
        params=SamplingParams(structured_outputs=StructuredOutputsParams(**spec), **values),
        eos_token_ids=(EOS,),
    )


def text_of(updates: Any, decode: Any) -> str:
    assert updates[-1].finish_reason == "stop", updates[-1]
    return str(decode(tokens_of(updates)))


def test_every_kind_is_followed(folder: Path, decode: Any) -> None:
    made = engine(folder)
    kinds: list[tuple[dict[str, Any], Any]] = [
        ({"json": PERSON}, lambda t: json.loads(t)["age"] in (1, 23, 456)),
        ({"json": json.dumps(PERSON)}, lambda t: set(json.loads(t)) == {"name", "age"}),
        ({"regex": "(ab|cd){2,4}[0-9]"}, lambda t: re.fullmatch("(ab|cd){2,4}[0-9]", t)),
        ({"choice": ["yes", "no", 'a "quoted" one', "ja\n"]}, lambda t: t in ("yes", "no", 'a "quoted" one', "ja\n")),
        ({"grammar": 'start: "<" /[a-c]/ ">" start | "."'}, lambda t: re.fullmatch("(<[a-c]>)*[.]", t)),
        ({"grammar": 'root ::= "x" | "yz" root'}, lambda t: re.fullmatch("(yz)*x", t)),
    ]  # fmt: skip
    requests = [
        asked(f"{k}-{seed}", seed, **spec) for k, (spec, _) in enumerate(kinds) for seed in range(4)
    ]
    found = run(made, *requests)
    for name, updates in found.items():
        text = text_of(updates, decode)
        assert kinds[int(name.partition("-")[0])][1](text), (name, text)
    assert len({text_of(found[f"0-{seed}"], decode) for seed in range(4)}) > 1


def test_neighbours_without_a_grammar_are_untouched(folder: Path) -> None:
    free = [
        Request(
            id=f"free{i}", prompt_token_ids=[3, i, 8], eos_token_ids=(EOS,),
            params=SamplingParams(temperature=0.0 if i else 1.0, seed=i, max_tokens=12),
        )
        for i in range(3)
    ]  # fmt: skip
    alone = run(engine(folder), *free)
    mixed = run(engine(folder), *free, asked("bound", json=PERSON), asked("word", choice=["no"]))
    for request in free:
        assert [u.token_ids for u in mixed[request.id]] == [u.token_ids for u in alone[request.id]]


def test_samples_preemption_and_chunks_change_nothing(folder: Path, decode: Any) -> None:
    requests = [asked(f"r{i}", i, json=PERSON, n=2) for i in range(3)]
    plenty = run(engine(folder), *requests)
    tight = engine(folder, num_kv_blocks=16, max_num_batched_tokens=8, max_num_seqs=6)
    found = run(tight, *requests)
    assert tight.stats().preemptions > 0
    for request in requests:
        for index in range(2):
            mine = [u for u in found[request.id] if u.index == index]
            same = [u for u in plenty[request.id] if u.index == index]
            assert tokens_of(mine) == tokens_of(same)
            json.loads(text_of(mine, decode))


def test_other_parameters_hold_beside_it(folder: Path, decode: Any) -> None:
    made = engine(folder)
    found = run(
        made,
        asked("min", regex="[ab]{1,9}", min_tokens=6),
        asked("over", choice=["hi"], min_tokens=5),
        asked("bias", regex="[ab]{6}", logit_bias={65: -100.0}, temperature=0.0),
        asked("logprobs", choice=["yes"], logprobs=2),
        asked("cut", regex="a{50}", count=5),
    )
    assert 6 <= len(text_of(found["min"], decode)) <= 9
    assert text_of(found["over"], decode) == "hi"
    letter = decode([65])
    assert letter not in text_of(found["bias"], decode)
    entries = [e for u in found["logprobs"] for e in u.logprobs or ()]
    assert len(entries) == 4 and all(e.logprob < 0 for e in entries)  # raw: the mask is not in them
    assert found["cut"][-1].finish_reason == "length"


def test_a_grammar_that_forbids_all_ends_its_own_request(folder: Path, decode: Any) -> None:
    made = engine(folder)
    found = run(
        made, asked("none", choice=["yes"], allowed_token_ids=[200]), asked("fine", choice=["yes"])
    )
    assert found["none"][-1].finish_reason == "error"
    assert text_of(found["fine"], decode) == "yes"


class _Slow(Grammars):
    """Compiles nothing before it is told to."""

    def __init__(self, real: Grammars) -> None:
        self._real = real
        self.go = threading.Event()

    def compile(self, params: StructuredOutputsParams) -> Future[Any]:
        def wait() -> Any:
            assert self.go.wait(60)
            return self._real.compile(params).result()

        return self._real._pool.submit(wait) if not self.go.is_set() else self._real.compile(params)

    def close(self) -> None:
        self.go.set()
        self._real.close()


def test_who_waits_for_a_grammar_takes_no_place(folder: Path) -> None:
    made = engine(folder, max_num_seqs=2)
    assert made._grammars is not None
    slow = made._grammars = _Slow(made._grammars)
    made.add(asked("first", choice=["a"]))
    made.add(asked("second", choice=["b"]))
    assert made.has_unfinished() and made.step() == []
    assert made.stats().waiting == 2
    ended = made.abort(["first"])
    assert [(u.request_id, u.finish_reason) for u in ended] == [("first", "abort")]
    third = Request(id="third", prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=3))
    made.add(third)
    names = [u.request_id for _ in range(3) for u in made.step()]
    assert set(names) == {"third"}
    made.scheduler.check()
    made.abort(["second"])
    made.scheduler.check()
    assert not made.has_unfinished() and made.stats().waiting == 0
    slow.go.set()
    assert made.step() == []
    made.shutdown()


def test_a_grammar_that_fails_late_is_told_and_takes_nobody_with_it(folder: Path) -> None:
    made = engine(folder)
    found = run(made, asked("bad", regex="(["), asked("fine", choice=["ok"]))
    assert found["bad"][-1].finish_reason == "error"
    assert "regex parse error" in str(found["bad"][-1].stop_reason)
    assert found["fine"][-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"json": {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "strin"}]}}}}, "#/properties/a/anyOf/1: Invalid type"),
        ({"json": {"$defs": {"x": {"type": "nope"}}, "items": {"$ref": "#/$defs/x"}}}, "#"),
        ({"json": {"properties": {"a/b": {"pattern": "(["}}}}, "#/properties/a~1b: regex parse error"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": False}, "an object or true, got false"),
        ({"json": "[1]"}, "an object or true, got [1]"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
        ({"grammar": "root ::= ("}, "cannot be read"),
        ({"regex": "a" * (structured.MAX_BYTES + 1)}, "at most 262,144 are taken"),
    ],
)  # fmt: skip
def test_a_bad_grammar_is_refused_by_name(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamError) as caught:
        check(StructuredOutputsParams(**spec))
    assert words in str(caught.value)
    assert caught.value.param == f"structured_outputs.{next(iter(spec))}"


@pytest.mark.parametrize("schema", [True, "true", {}])
def test_the_schema_of_anything_is_one(schema: Any) -> None:
    check(StructuredOutputsParams(json=schema))
    check(StructuredOutputsParams(json=schema, disable_any_whitespace=True))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"choice": []}, "must hold 1 to 4096"),
        ({"choice": ["", "a"]}, "non-empty"),
        ({"regex": 7}, "must be text"),
        ({"json": [1]}, "must be a JSON schema"),
        ({"regex": "a", "disable_any_whitespace": True}, "for JSON only"),
        ({"regx": "a"}, "did you mean 'regex'"),
    ],
)
def test_params_are_checked(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamError) as caught:
        StructuredOutputsParams(**spec)
    assert words in str(caught.value)


def test_ignore_eos_contradicts_it() -> None:
    with pytest.raises(ParamError, match="ends by EOS"):
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]), ignore_eos=True)


def test_white_space_can_be_kept_out(folder: Path, decode: Any) -> None:
    spec = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
    requests = [
        Request(
            id=str(seed), prompt_token_ids=[4, 4], eos_token_ids=(EOS,),
            params=SamplingParams(seed=seed, max_tokens=80, structured_outputs=spec),
        )
        for seed in range(4)
    ]  # fmt: skip
    for updates in run(engine(folder), *requests).values():
        assert re.fullmatch(r'\{"name":".*","age":\d+\}', text_of(updates, decode), re.DOTALL)


def test_a_grammar_is_compiled_once_and_taken_back(folder: Path) -> None:
    made = engine(folder)
    grammars = made._grammars
    assert grammars is not None
    spec = StructuredOutputsParams(regex="ab+")
    assert grammars.compile(spec) is grammars.compile(StructuredOutputsParams(regex="ab+"))
    state, other = grammars.state(spec), grammars.state(spec)
    first = state.mask().copy()

    class Tokens:
        num_prompt = 2
        tokens = np.array([1, 1, 65, 66, 66], np.int32)  # the alphabet begins at "!"
        num_tokens, num_output = 2, 0

    a = next(i for i in range(264) if first[i // 32] >> (i % 32) & 1)
    Tokens.tokens[2] = a
    grown: Any = Tokens()
    grown.num_tokens, grown.num_output = 3, 1
    state.advance(grown)
    second = state.mask().copy()
    assert not np.array_equal(first, second)
    grown.num_tokens, grown.num_output = 2, 0
    state.advance(grown)
    assert np.array_equal(state.mask(), first)
    assert np.array_equal(other.mask(), first)
    assert isinstance(other, GrammarState) and not other.error


@pytest.mark.parametrize("ops", [Ops(), CpuOps()], ids=["portable", "cpu"])
def test_masks_keep_exactly_the_named_tokens(ops: Ops) -> None:
    dice = np.random.default_rng(0)
    for vocab in (1, 31, 32, 33, 264, 1000, 20011):
        logits = torch.from_numpy(dice.standard_normal((5, vocab)).astype(np.float32))
        keep = dice.random((3, vocab)) < 0.3
        words = np.zeros((3, -(-vocab // 32) * 32), bool)
        words[:, :vocab] = keep
        packed = np.packbits(words, axis=1, bitorder="little").view(np.int32)
        rows = torch.tensor([4, 0, 2])
        masked = logits.clone()
        ops.mask_logits(masked, rows, torch.from_numpy(packed))
        wanted = logits.clone()
        for row, kept in zip(rows.tolist(), keep, strict=True):
            wanted[row, torch.from_numpy(~kept)] = float("-inf")
        assert torch.equal(masked, wanted)
