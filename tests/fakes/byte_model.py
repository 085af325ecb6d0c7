"""A tiny model whose tokens are bytes, so that what it draws can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tiny_models import make

EOS = 256


def byte_llama(where: Path, **changes: Any) -> Path:
    """A random Llama with a token for each byte, some that hold several, and EOS. changes: of its config."""
    model = make("Llama", {"vocab_size": 264, "eos_token_id": EOS, **changes})
    model.save_pretrained(where)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {"<end>": EOS, '{"': 257, "name": 258, "na": 259, "me": 260}
    merges = [("n", "a"), ("m", "e"), ("na", "me"), ("{", '"')]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    made.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return where
