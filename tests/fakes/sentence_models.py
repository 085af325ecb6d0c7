"""Tiny random embedding models in the layout of sentence-transformers, and what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tiny_models import BASE, VOCAB

from octavo.core.params import SamplingParams
from octavo.core.pooling import Pooling
from octavo.core.types import Request

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "and",
    "ran",
    "away",
    "red",
    "blue",
    "house",
    "tree",
    "un",
    "##able",
    "##s",
    "##ed",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ENCODERS = {"Bert": 0, "Roberta": 2, "XLMRoberta": 2}
"""Kind, and the position of its first token."""


def encoder(kind: str, **changes: Any) -> Any:
    """A random encoder without a pooling layer of its own."""
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 96 + ENCODERS[kind],
        "type_vocab_size": 2 if kind == "Bert" else 1,
        "pad_token_id": 0 if kind == "Bert" else 1,
    }
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**values | changes)
    return randomised(
        getattr(transformers, f"{kind}Model")(config, add_pooling_layer=kind == "Bert")
    )


def decoder(kind: str, **changes: Any) -> Any:
    """A random decoder without a head."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**BASE | changes)
    config._attn_implementation = "eager"
    return randomised(getattr(transformers, f"{kind}Model")(config))


def randomised(model: Any) -> Any:
    dice = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=dice)
            norm = "norm" in name.lower() and name.endswith("weight")
            weight.copy_(1 + 0.2 * noise if norm else 0.25 * noise)
    return model.eval()


def word_tokenizer(special: bool = True) -> tokenizers.Tokenizer:
    """WordPiece over a few words, with [CLS] and [SEP] around a text."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    if special:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return made


def save(
    model: Any,
    folder: Path,
    *,
    pooling: str | None = None,
    normalize: bool = False,
    max_seq_length: int | None = None,
    lowercase: bool = False,
    further: tuple[str, ...] = (),
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes a model with its tokenizer; with `pooling` (as Pooling's config names it) also
    sentence-transformers' files."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if config:
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(known | config))
    if pooling is None:
        return folder
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *further]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    settings: dict[str, Any] = {f"pooling_mode_{mode}": mode == pooling for mode in modes}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": model.config.hidden_size, **settings})
    )
    sentence: dict[str, Any] = {"max_seq_length": max_seq_length, "do_lower_case": lowercase}
    (folder / "sentence_bert_config.json").write_text(json.dumps(sentence))
    return folder


@torch.no_grad()
def expected(model: Any, ids: list[int], kind: str, normalize: bool = True) -> torch.Tensor:
    """The embedding as transformers' hidden states give it, [H] in float64."""
    hidden = model(torch.tensor([ids])).last_hidden_state[0].double()
    vector = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[kind]
    return vector / vector.norm() if normalize else vector


def embed(name: str, ids: list[int], kind: str, normalize: bool = True, **values: Any) -> Request:
    """A request for an embedding."""
    pooling = Pooling(kind, normalize)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=0, temperature=0.0)
    return Request(id=name, prompt_token_ids=ids, params=params, pooling=pooling, **values)


def numbers(data: bytes | None) -> torch.Tensor:
    """An update's embedding, in float64."""
    assert data is not None
    return torch.frombuffer(bytearray(data), dtype=torch.float32).double()
