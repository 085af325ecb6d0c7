"""Banned words stay out of the text, whatever tokens would spell them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import NullRunner, request, rig

from octavo.core import ops
from octavo.core.bad_words import BadWords, VocabularyIndex, _after
from octavo.core.contract import Ops
from octavo.core.sampler import Sampler
from octavo.core.types import StepPlan, StepResult

letters = st.binary(min_size=1, max_size=4).map(lambda b: bytes(97 + x % 3 for x in b))
vocabularies = st.lists(st.one_of(letters, st.just(b"")), min_size=1, max_size=25)
words = st.lists(letters, min_size=1, max_size=3)


def completes(text: bytes, token: bytes, banned: list[bytes]) -> bool:
    """The definition: a banned word ends inside this token."""
    whole = text + token
    return any(
        whole.startswith(word, at) and at + len(word) > len(text)
        for word in banned
        for at in range(len(whole))
    )


@settings(max_examples=400, deadline=None)
@given(vocabularies, words, st.lists(st.integers(0, 24), max_size=12))
def test_exactly_the_tokens_that_complete_a_word(
    vocabulary: list[bytes], banned: list[bytes], output: list[int]
) -> None:
    output = [t % len(vocabulary) for t in output]
    watcher = BadWords(banned, VocabularyIndex(vocabulary))
    for end in range(len(output) + 1):
        watcher.advance(output[:end])
        text = b"".join(vocabulary[t] for t in output[:end])
        wanted = {t for t, piece in enumerate(vocabulary) if completes(text, piece, banned)}
        got = set(watcher.banned().tolist())
        # A word that stands already in the text could also be completed again by its own tail.
        assert got == wanted


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_text_never_contains_a_word(data: st.DataObject) -> None:
    """A walk that takes any allowed token: the text it spells has no banned word."""
    piece = st.binary(min_size=0, max_size=3)
    vocabulary = data.draw(st.lists(piece, min_size=2, max_size=40))
    source = b"".join(vocabulary) or b"x"
    at = data.draw(st.integers(0, len(source) - 1))
    banned = [source[at : at + data.draw(st.integers(1, 5))], data.draw(letters)]
    watcher = BadWords(banned, VocabularyIndex(vocabulary))
    dice = random.Random(data.draw(st.integers(0, 2**32)))
    output: list[int] = []
    for _ in range(60):
        watcher.advance(output)
        forbidden = set(watcher.banned().tolist())
        allowed = [t for t in range(len(vocabulary)) if t not in forbidden]
        if not allowed:
            break
        output.append(dice.choice(allowed))
        text = b"".join(vocabulary[t] for t in output)
        assert not any(word in text for word in banned)


def test_a_character_begun_in_the_prompt_counts() -> None:
    """Streamed text begins with the character that the prompt's last bytes left open."""
    table = [
        b"\xc3",
        b"\xa9",
        b"\xa9t",
        b"t",
        b"caf",
        "\u00e9".encode(),
        b"\xf0\x9f",
        b"\x99",
        b"\x82",
    ]
    index = VocabularyIndex(table)
    word = "\u00e9".encode()
    assert sorted(BadWords([word], index, [4, 0]).banned().tolist()) == [1, 2, 5]
    assert sorted(BadWords([word], index, [4, 5]).banned().tolist()) == [5]
    assert sorted(BadWords([b"t"], index, [0]).banned().tolist()) == [2, 3]
    smile = BadWords(["\U0001f642".encode()], index, [3, 6])
    smile.advance([7])
    assert smile.banned().tolist() == [8]


@pytest.mark.parametrize("prefix", [b"\xff", b"\xff\xff", b"a\xff", b"a", b"\x00"])
def test_prefix_ranges_at_the_edge_of_a_byte(prefix: bytes) -> None:
    table = [b"", b"a", b"a\xfe", b"a\xff", b"a\xffz", b"b", b"\xfe", b"\xff", b"\xff\x00", b"\xff\xff", b"\xff\xff\xff", b"\x00", b"\x00\x01"]  # fmt: skip
    got = VocabularyIndex(table).starting_with(prefix)
    assert sorted(got.tolist()) == [i for i, t in enumerate(table) if t.startswith(prefix)]
    assert _after(b"a\xff") == b"b" and _after(b"\xff") == b""


def byte_vocabulary(size: int, seed: int) -> list[bytes]:
    dice = random.Random(seed)
    syllables = [
        b"the",
        b"en",
        b" ",
        b"d",
        b"end",
        b"e",
        b"n",
        b" the",
        b"d ",
        "é".encode(),
        b"\xc3",
        b"\xa9",
    ]
    return [b"".join(dice.choices(syllables, k=dice.randint(1, 2))) for _ in range(size)]


class WordRunner(NullRunner):
    """Logits from the null runner's hash, drawn by the real sampler over a vocabulary of syllables."""

    vocabulary = byte_vocabulary(120, 1)

    def draw(self, step: StepPlan, rows: np.ndarray) -> StepResult:
        if not hasattr(self, "sampler"):
            index = VocabularyIndex(self.vocabulary)
            self.sampler = Sampler(ops.sample, Ops(), "cpu", lambda skip: index)
        logits = [np.random.default_rng(int(h)).normal(0, 1, len(self.vocabulary)) for h in rows]
        return self.sampler.run(step, torch.tensor(np.stack(logits), dtype=torch.float32))


@pytest.mark.parametrize("tight", [False, True])
def test_through_the_engine(tight: bool) -> None:
    """Also with samples, preemption and a greedy neighbour that may say anything."""
    size: dict[str, Any] = {"blocks": 12, "block_size": 4} if tight else {}
    r = rig(runner=WordRunner, **size)
    r.engine.add(request("free", [1, 2], max_tokens=40, n=1, temperature=1.0, seed=1, priority=-1))
    r.engine.add(
        request(
            "a",
            [1, 2],
            max_tokens=30,
            n=2,
            temperature=1.0,
            seed=1,
            bad_words=["end", "é", "the d"],
        )
    )
    r.engine.add(request("b", [3], max_tokens=30, temperature=1.0, seed=2, bad_words=["en", "d"]))
    r.run()
    assert not tight or r.scheduler.stats().preemptions > 0

    def text(name: str, index: int = 0) -> bytes:
        return b"".join(WordRunner.vocabulary[t] for t in r.tokens[name, index])

    assert b"end" in text("free") and b"d" in text("free")
    for i in (0, 1):
        assert len(r.tokens["a", i]) == 30
        assert not any(w in text("a", i) for w in (b"end", "é".encode(), b"the d"))
    assert b"en" not in text("b") and b"d" not in text("b")
