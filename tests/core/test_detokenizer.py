"""Ids -> text piece by piece: what is streamed is what decoding everything at once gives."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from octavo.core.detokenizer import Detokenizer
from octavo.core.loading.gguf_tokenizer import byte_alphabet
from octavo.core.loading.tokenizer import Tokenizer

HARD = "散行客单价🙂👩‍👩‍👧"
ALPHABET = list(byte_alphabet().values())


def byte_fallback(strip: bool = False) -> Tokenizer:
    """Sentencepiece's kind: a few pieces, and a token for every byte."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "▁Hello", "▁wor", "ld", "é", "客"):
        vocab[piece] = len(vocab)
    backend = Backend(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    tail = [decoders.Strip(content=" ", left=1)] if strip else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, named={"bos_token": "<s>"})


def byte_level() -> Tokenizer:
    """GPT-2's kind, with a special token, a plain added one and one that is not in the alphabet."""
    vocab = {c: i for i, c in enumerate([*ALPHABET, "ĠHello", "Ġw", "orld"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(["[a b]", "价"])
    return Tokenizer(backend)


def generic(kind: str) -> Tokenizer:
    """Decoders that are not the tokens' bytes in a row."""
    pieces = ["▁Hello", "▁wor", "ld", "▁", "x"] if kind == "metaspace" else ["he", "##llo", "wor"]
    backend = Backend(models.WordLevel({p: i for i, p in enumerate([*pieces, "[UNK]"])}, "[UNK]"))
    backend.decoder = decoders.Metaspace() if kind == "metaspace" else decoders.WordPiece()
    return Tokenizer(backend)


TOKENIZERS = {
    "byte_fallback": byte_fallback(),
    "byte_fallback_strip": byte_fallback(strip=True),
    "byte_level": byte_level(),
    "metaspace": generic("metaspace"),
    "wordpiece": generic("wordpiece"),
}


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int], **options: Any) -> list[str]:
    """The pieces that come when ids are pushed a few at a time."""
    detokenizer = Detokenizer(tokenizer, **options)
    pieces, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.flush()]


def test_kinds() -> None:
    kinds = {name: tokenizer.decoder_kind for name, tokenizer in TOKENIZERS.items()}
    assert list(kinds.values()) == ["byte_fallback"] * 2 + ["byte_level"] + ["generic"] * 2
    assert TOKENIZERS["byte_fallback_strip"].strips_leading_space


@pytest.mark.parametrize("name", ["byte_fallback", "byte_fallback_strip", "byte_level"])
def test_one_byte_per_token_never_shows_half_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    spell = (lambda b: 3 + b) if name != "byte_level" else (lambda b: ALPHABET_ID[b])
    ids = [spell(byte) for byte in HARD.encode()]
    pieces = streamed(tokenizer, ids, [1])
    assert "".join(pieces) == HARD == tokenizer.decode(ids) == tokenizer.backend.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)
    # each character comes with its last byte, none later
    assert [piece for piece in pieces if piece] == list(HARD)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == HARD.encode()


ALPHABET_ID = {byte: ALPHABET.index(char) for byte, char in byte_alphabet().items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_pieces_joined_are_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    skip = data.draw(st.booleans())
    pieces = streamed(tokenizer, ids, sizes, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_fallback", "byte_fallback_strip", "byte_level"])
@given(text=st.text(max_size=20), skip=st.booleans())
@example(text=" " + HARD, skip=True)
@settings(max_examples=120, deadline=None)
def test_valid_text_decodes_as_the_library_does(name: str, text: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, ids, [1], skip_special_tokens=skip)) == tokenizer.decode(
        ids, skip
    )


def test_invalid_bytes_become_replacement_characters() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [3 + 0xE5, 3 + 0xAE, tokenizer.token_to_id("ld") or 0, 3 + 0xF0]
    assert tokenizer.decode(ids) == "\ufffdld\ufffd"
    assert streamed(tokenizer, ids, [1]) == ["", "", "\ufffdld", "", "\ufffd"]


def test_leading_space() -> None:
    tokenizer = TOKENIZERS["byte_fallback_strip"]
    hello, bos = tokenizer.token_to_id("▁Hello") or 0, 1
    assert streamed(tokenizer, [hello, hello], [1]) == ["Hello", " Hello", ""]
    # an output that continues a prompt keeps its space
    assert streamed(tokenizer, [hello], [1], prompt_ids_tail=[hello])[0] == " Hello"
    assert streamed(tokenizer, [bos, hello], [1]) == ["", "Hello", ""]
    assert "".join(streamed(tokenizer, [bos, hello], [1], skip_special_tokens=False)) == "<s> Hello"


def test_character_begun_in_the_prompt_is_finished() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    first, *rest = (3 + byte for byte in "🙂".encode())
    assert streamed(tokenizer, rest, [1], prompt_ids_tail=[first])[2] == "🙂"


def test_ids_outside_the_vocabulary_give_nothing() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert streamed(tokenizer, [10**6, ALPHABET_ID[ord("a")]], [1]) == ["", "a", ""]


def test_added_tokens_are_plain_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("x[a b]价<|end|>")
    assert tokenizer.decode(ids) == "x[a b]价"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "x[a b]价<|end|>"


def test_cost_of_a_token_is_small_and_constant() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(HARD * 40)
    tokenizer.vocabulary_bytes()

    def cost(count: int) -> float:
        best = float("inf")
        for _ in range(5):
            detokenizer = Detokenizer(tokenizer)
            start = time.process_time()
            for _ in range(count):
                for token_id in ids:
                    detokenizer.push((token_id,))
            best = min(best, (time.process_time() - start) / count / len(ids))
        return best

    assert cost(1) < 15e-6  # 0.6 µs on an idle core; a loaded one is given time
    assert cost(20) < 4 * cost(1)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_forks_go_their_own_ways(name: str, data: st.DataObject) -> None:
    """Each gives what one gives that saw its tokens alone, in the middle of a character too."""
    tokenizer = TOKENIZERS[name]
    some = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8)
    common, one, two = data.draw(some), data.draw(some), data.draw(some)
    first = Detokenizer(tokenizer)
    begun = "".join(first.push([token]) for token in common)
    second = first.fork()
    for detokenizer, rest in ((first, one), (second, two)):
        text = begun + "".join(detokenizer.push([token]) for token in rest) + detokenizer.flush()
        assert text == "".join(streamed(tokenizer, common + rest, [1]))
