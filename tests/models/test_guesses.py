"""Greedy rows are drawn before their grammars are asked: the tokens are those of rows that are masked first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_model import EOS, byte_llama
from tiny_models import engine, run

from octavo.backends.cpu.ops import CpuOps
from octavo.core import guesses
from octavo.core.contract import Ops
from octavo.core.params import SamplingParams, StructuredOutputsParams
from octavo.core.sampler import Sampler
from octavo.core.structured import GrammarState, allows
from octavo.core.types import Request

pytestmark = pytest.mark.usefixtures("one_thread")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [1, 23, 456]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SPECS: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": PERSON, "disable_any_whitespace": True},
    {"regex": "(ab|cd){2,4}[0-9]*"},
    {"choice": ["name", "named", "mena", "{"]},
    {"grammar": 'start: "<" /[a-n]+/ ">" start | "name"'},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"))


def _state(folder: Path, spec: dict[str, Any]) -> GrammarState:
    grammars = engine(folder)._grammars
    assert grammars is not None
    return grammars.state(StructuredOutputsParams(**spec))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: next(iter(spec)))
def test_a_token_is_taken_where_the_mask_leaves_it(folder: Path, spec: dict[str, Any]) -> None:
    dice = np.random.default_rng(5)
    start = _state(folder, spec)
    settled = 0
    for _ in range(3):
        state = start.fork()
        for _ in range(25):
            mask = state.fork().mask()
            left = [t for t in range(264) if allows(mask, t)]
            taken = []
            for token in range(264):
                other = state.fork()
                if other.take(token):
                    taken.append(token)
                else:  # and it is where it was
                    assert np.array_equal(other.mask(), mask)
                assert other.settled < 0 or left == [other.settled]
            assert not state.fork().take(-1)
            if left == [EOS]:
                assert taken in ([], [EOS])  # the text is complete: who is refused has its mask
                break
            assert taken == left
            settled += len(left) == 1
            longest = [t for t in left if t > EOS] or left
            token = int(dice.choice(longest if dice.random() < 0.5 else left))
            assert state.take(token)
            if token == EOS:
                break
    assert settled or "regex" in spec  # text that can be spelled in one way only was met


def _asked(name: str, spec: dict[str, Any], **params: Any) -> Request:
    values = {"temperature": 0.0, "max_tokens": 48, **params}
    return Request(
        id=name,
        prompt_token_ids=[5, 9, len(name), 7],
        params=SamplingParams(structured_outputs=StructuredOutputsParams(**spec), **values),
        eos_token_ids=(EOS,),
    )


def _requests() -> list[Request]:
    more: dict[str, dict[str, Any]] = {
        "samples": {"n": 3},
        "logprobs": {"logprobs": 3},
        "bias": {"logit_bias": {65: 4.0, 66: -100.0}},
        "allowed": {"allowed_token_ids": [*range(60, 100), EOS]},
        "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        "early": {"min_tokens": 7},
        "bad": {"bad_words": ["ab"]},
        "cut": {"max_tokens": 5},
        "warm": {"temperature": 0.8, "seed": 4},
        "beams": {"use_beam_search": True, "best_of": 2},
    }
    made = [_asked(f"{i}-{k}", spec) for k in range(2) for i, spec in enumerate(SPECS)]
    for name, params in more.items():
        spec = SPECS[0] if name not in ("allowed", "bias") else {"regex": "[A-Za-z]{4,9}"}
        made.append(_asked(name, spec, **params))
    free = SamplingParams(temperature=0.0, max_tokens=20)
    made.append(Request(id="free", prompt_token_ids=[3, 1], params=free, eos_token_ids=(EOS,)))
    return made


def _told(found: dict[str, Any]) -> dict[str, Any]:
    """What clients see: tokens, log-probabilities and ends, by request and sample."""
    return {
        name: [
            (u.index, u.token_ids, u.finish_reason, repr(u.logprobs))
            for u in sorted(updates, key=lambda u: u.index)
        ]
        for name, updates in found.items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device": "cpu", "num_kv_blocks": 20, "max_num_batched_tokens": 24, "max_num_seqs": 9},
        {"device": "cpu", "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}},
    ],
    ids=["reference", "tight", "drafts"],
)  # fmt: skip
def test_masks_first_or_only_where_a_token_is_refused(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 0
    masks = guesses.masks

    def counted(states: Any) -> Any:
        nonlocal refused
        refused += len(states)
        return masks(states)

    monkeypatch.setattr(guesses, "masks", counted)
    made = engine(folder, **options)
    guessed = _told(run(made, *_requests()))
    assert refused > 20  # it was not all taken
    if "speculative_config" in options:
        assert made.stats().accepted_tokens > 0
    if "num_kv_blocks" in options:
        assert made.stats().preemptions > 0
    monkeypatch.setattr(Sampler, "_guesses", lambda *_: [])
    before = refused
    assert _told(run(engine(folder, **options), *_requests())) == guessed
    assert refused == before


def test_no_mask_is_made_for_what_the_model_would_say_anyway(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=24)
    prompt = [5, 9, 3, 7]
    asked = Request(id="free", prompt_token_ids=prompt, params=free, eos_token_ids=())
    made = engine(folder, device="cpu")
    said = [t for u in run(made, asked)["free"] for t in u.token_ids]
    assert EOS not in said
    called: list[int] = []
    masks = guesses.masks
    monkeypatch.setattr(guesses, "masks", lambda s: called.append(len(s)) or masks(s))
    spec = StructuredOutputsParams(grammar="start: /(.|\\n)*/s")
    bound = SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=spec)
    asked = Request(id="bound", prompt_token_ids=prompt, params=bound, eos_token_ids=(EOS,))
    text = [t for u in run(made, asked)["bound"] for t in u.token_ids]
    if text == said:
        assert not called
    else:  # bytes that are no text were refused, and nothing else
        assert len(called) < len(text)


@pytest.mark.parametrize("ops", [Ops(), CpuOps()], ids=["portable", "cpu"])
def test_the_best_of_the_allowed(ops: Ops) -> None:
    dice = np.random.default_rng(0)
    for vocab in (1, 31, 32, 33, 47, 264, 1000, 20011):
        for share in (0.0, 0.01, 0.5, 1.0):
            logits = dice.integers(-4, 5, (6, vocab)).astype(np.float32)  # so some tie
            logits[3] = -np.inf
            keep = dice.random((5, vocab)) < share
            words = np.ones(
                (5, -(-vocab // 32) * 32), bool
            )  # what is behind the vocabulary means nothing
            words[:, :vocab] = keep
            packed = np.packbits(words, axis=1, bitorder="little").view(np.int32)
            rows = np.array([4, 0, 2, 3, 5])
            masked = np.where(keep, logits[rows], -np.inf)
            best = masked.argmax(1)
            wanted = np.where(masked.max(1) > -np.inf, best, -1)
            given = torch.from_numpy(logits)
            got = ops.best_allowed(given, torch.from_numpy(rows), torch.from_numpy(packed))
            assert got.tolist() == wanted.tolist(), (vocab, share)


@pytest.mark.parametrize("ops", [Ops(), CpuOps()], ids=["portable", "cpu"])
def test_no_best_one_where_the_allowed_are_not_finite(ops: Ops) -> None:
    logits = torch.zeros(4, 100)
    logits[0, 7] = logits[1, 8] = float("nan")
    logits[2, 7] = logits[3, 8] = float("inf")
    words = torch.tensor([[1 << 7 | 1 << 9, 0, 0, 1]] * 4, dtype=torch.int32)
    assert ops.best_allowed(logits, torch.arange(4), words).tolist() == [-1, 7, -1, 7]
