"""What the engine's process knows of a model's tokenizer, loaded when the first request needs it."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from octavo.core.bad_words import VocabularyIndex
from octavo.core.beam_text import BeamTexts
from octavo.core.loading.files import ModelFiles
from octavo.core.structured import Grammars, make_tokenizer


def grammars_of(files: ModelFiles, vocab_size: int, eos: tuple[int, ...]) -> Grammars:
    """Compiles grammars for this model's tokenizer, which is loaded for the first of them."""

    def tokenizer() -> Any:
        from octavo.core.loading.tokenizer import load_tokenizer

        known = load_tokenizer(files)
        tokens = known.vocabulary_bytes(skip_special=False)[:vocab_size]
        tokens = tokens + [b""] * (vocab_size - len(tokens))
        special = sorted(i for i in known.special_ids if i < vocab_size)
        own = known.eos_token_id
        ends = eos if own is None or own >= vocab_size else (*eos, own)
        return make_tokenizer(
            tokens,
            special,
            tuple(dict.fromkeys(ends)),
            partial(known.encode, add_special_tokens=False),
        )

    return Grammars(tokenizer, vocab_size)


def texts_of(files: ModelFiles) -> BeamTexts:
    """Begins the texts of beams with this model's tokenizer, which is loaded for the first of them."""

    def tokenizer() -> Any:
        from octavo.core.loading.tokenizer import load_tokenizer

        return load_tokenizer(files)

    return BeamTexts(tokenizer)


def vocabulary_of(files: ModelFiles, vocab_size: int) -> Any:
    """skip_special -> VocabularyIndex, loading the tokenizer when first asked. It has an entry for each
    of the model's logits: a tokenizer may know fewer tokens, or more."""

    @cache
    def index(skip_special: bool) -> VocabularyIndex:
        from octavo.core.loading.tokenizer import load_tokenizer

        known = load_tokenizer(files).vocabulary_bytes(skip_special)[:vocab_size]
        return VocabularyIndex(known + [b""] * (vocab_size - len(known)))

    return index
