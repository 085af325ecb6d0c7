"""A GGUF file's vocabulary -> a tokenizer of the tokenizers library.

The result is the one transformers builds from the same file (its gguf_tokenizer_mapping, which this
follows), with two differences: a pre-tokenizer that is not known is an error instead of a guess, and
no token is added that the file's vocabulary lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.core.loading.errors import TokenizerError
from octavo.core.loading.gguf import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the expression that splits text; None: GPT-2's, which ByteLevel has built in.
# smollm: the original splits single digits off first. transformers' conversion does not, and token
# ids equal to it are what this engine is compared by. They differ where white space of two or more
# characters (a blank line before "1.") stands before a digit.
_SPLITS: dict[str | None, str | None] = {
    None: None,
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "pixtral": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "dbrx": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "megrez": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
# Tokens a tokenizer class of transformers treats as special whether the file marks them or not.
_CLASS_SPECIALS = {
    "gpt2": ("<|endoftext|>",),
    "llama": ("<unk>", "<s>", "</s>"),
    "gemma": ("<unk>", "<bos>", "<eos>", "<pad>", "<mask>"),
}
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes as printable characters (byte -> character)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in spelling]
    spelling.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return spelling


def convert_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, settings) of an open GGUF file.

    settings has the keys of tokenizer_config.json: bos_token, eos_token, unk_token, pad_token (text
    or None), chat_template (text or None); and vocab_size, the number of ids. Raises TokenizerError
    for a kind that is not known.
    """
    kind = file.get("tokenizer.ggml.model")
    tokens = file.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise TokenizerError(f"{file.path} holds no vocabulary (tokenizer.ggml.tokens)")
    settings: dict[str, Any] = {}
    for name, key in _NAMED.items():
        token_id = file.get(f"tokenizer.ggml.{key}")
        settings[name] = tokens[token_id] if token_id is not None else None
    settings["chat_template"] = file.get("tokenizer.chat_template")
    settings["vocab_size"] = len(tokens)
    if kind == "gpt2":
        family = "gpt2"
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        family = "gemma" if file.architecture.startswith("gemma") else "llama"
        tokenizer = _gemma(tokens) if family == "gemma" else _sentencepiece(file, tokens)
    else:
        raise TokenizerError(
            f"{file.path} has a tokenizer of kind {kind!r}; gpt2 (byte-level BPE) and llama "
            "(sentencepiece) are built. Use the model's safetensors folder instead."
        )
    named = [settings[name] for name in _NAMED if settings[name] is not None]
    _add_special(tokenizer, file, tokens, [*_CLASS_SPECIALS[family], *named], kind == "gpt2")
    _set_post_processor(
        tokenizer,
        settings["bos_token"]
        if file.get("tokenizer.ggml.add_bos_token", kind == "llama")
        else None,
        settings["eos_token"] if file.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return tokenizer, settings


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = file.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise TokenizerError(
            f"{file.path} names the pre-tokenizer {pre!r}, which is not known, and a guess would "
            f"give wrong tokens. Known: {', '.join(sorted(name for name in _SPLITS if name))}. Use "
            "the model's safetensors folder instead."
        )
    spelling = byte_alphabet()
    alphabet = set(spelling.values())
    vocab = {
        token if alphabet.issuperset(token) else "".join(spelling[b] for b in token.encode()): index
        for index, token in enumerate(tokens)
    }
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix="")
    )
    split = _SPLITS[pre]
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gemma(tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    # Runs of spaces are stored as spaces but looked up as "▁"; and merges follow the vocabulary's
    # order, not the scores.
    spelled = ["▁" * len(t) if " " in t and not t.strip() else t for t in tokens]
    vocab = {token: index for index, token in enumerate(spelled)}
    merges = _derived_merges(vocab, {token: -index for token, index in vocab.items()})
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, fuse_unk=True, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges", [])]
    if not merges:
        scores = file.get("tokenizer.ggml.scores", [])
        merges = _derived_merges(vocab, dict(zip(tokens, scores, strict=True)))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first", split=False
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def _derived_merges(vocab: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """The merges a vocabulary implies: every split of a token into two tokens, best token first."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in scores.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(left, right) for left, right in halves if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(score, len(left), len(right), left, right) for left, right in pairs]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def _add_special(
    tokenizer: Tokenizer,
    file: GgufFile,
    tokens: list[str],
    named: list[str],
    byte_level: bool,
) -> None:
    from tokenizers import AddedToken

    kinds = file.get("tokenizer.ggml.token_type", [])
    alphabet = set(byte_alphabet().values())
    marked = zip(tokens, kinds, strict=False)
    special, plain = dict.fromkeys(named), []
    for token, kind in marked:
        if kind == _CONTROL and (not byte_level or alphabet.issuperset(token)):
            special[token] = None
        elif kind == _USER_DEFINED and token not in special:
            plain.append(token)
    # A token spelled otherwise in the vocabulary would become a new one past the model's size.
    held = [token for token in special if tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in held])
    held = [token for token in plain if tokenizer.token_to_id(token) is not None]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in held])


def _set_post_processor(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    from tokenizers import processors

    if bos is None and eos is None:
        return
    single = " ".join(
        [f"{bos}:0"] * (bos is not None) + ["$A:0"] + [f"{eos}:0"] * (eos is not None)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in (bos, eos) if t is not None],
    )
