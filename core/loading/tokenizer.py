"""Text <-> token ids, and conversations -> text.

Built on the tokenizers library alone; transformers is asked only for a folder that has no
tokenizer.json, torch never.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.core.loading import chat
from octavo.core.loading.errors import TemplateError, TokenizerError
from octavo.core.loading.files import ModelFiles, file_identity, read_json, write_atomically
from octavo.core.loading.gguf_tokenizer import byte_alphabet

if TYPE_CHECKING:
    import tokenizers

# Counts the converter's changes: what an older one left in the cache is built again.
_CONVERTER_VERSION = 1
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
DecoderKind = Literal["byte_level", "byte_fallback", "generic"]


class Tokenizer:
    """One model's tokenizer.

    backend: the tokenizers library's object. named: bos_token, eos_token, unk_token, pad_token, …
    as text, where the model has them. chat_template: jinja text, several by name, or None.
    vocab_size: the number of ids, if known; else counted.

    Safe to share between threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.named = dict(named or {})
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # The highest id counts, not the number of tokens: vocabularies have holes.
        self.vocab_size = vocab_size or max(backend.get_vocab().values(), default=-1) + 1
        self.decoder_kind, self.strips_leading_space = _decoder_kind(backend)
        self._bytes_to_char = byte_alphabet()
        self._char_to_byte = {char: byte for byte, char in self._bytes_to_char.items()}
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._vocabulary: dict[bool, list[bytes]] = {}

    # ids of the named tokens

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the model has one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if the model has one. Configurations may name more."""
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id that fills up batches, if the model has one."""
        return self._named_id("pad_token")

    def _named_id(self, name: str) -> int | None:
        token = self.named.get(name)
        return None if token is None else self.token_to_id(token)

    # text -> ids -> text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. add_special_tokens: with the BOS (EOS) the model's texts begin (end) with.

        Special tokens written out in ``text`` become their ids either way.
        """
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """``encode`` of several texts, on several cores."""
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of ids.

        Equal to the tokenizers library's decode where the bytes are valid UTF-8. Bytes that are not
        become U+FFFD as Python's "replace" does it, so that text decoded piece by piece and at once
        is the same. Ids outside the vocabulary (a model's padding rows) give nothing.
        spaces_between_special_tokens is accepted for its API: such decoders never put spaces there.
        """
        if self.decoder_kind == "generic":
            text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        skip = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join([self.token_bytes(i) for i in ids if i not in skip])
        text = raw.decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    # single tokens

    def id_to_token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id outside it."""
        token: str | None = self.backend.id_to_token(token_id) if token_id >= 0 else None
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None if there is none."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token contributes to a text (special ones their spelling); b"" outside."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            token = self.backend.id_to_token(token_id)
            known = b"" if token is None else self._spelled(token)
            self._bytes[token_id] = known
        return known

    def _spelled(self, token: str) -> bytes:
        if self.decoder_kind == "byte_level":
            try:
                return bytes([self._char_to_byte[char] for char in token])
            except KeyError:  # an added token, in plain text
                return token.encode()
        if self.decoder_kind == "byte_fallback" and _is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def token_text(self, token_id: int) -> str:
        """A token's text on its own, for display; parts of characters show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def vocabulary_bytes(self, skip_special: bool = True) -> list[bytes]:
        """``token_bytes`` of every id, computed once; special ones are b"" if ``skip_special``."""
        if skip_special not in self._vocabulary:
            skip = self.special_ids if skip_special else frozenset()
            self._vocabulary[skip_special] = [
                b"" if i in skip else self.token_bytes(i) for i in range(self.vocab_size)
            ]
        return self._vocabulary[skip_special]

    # conversations

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as the text the model was trained on; see ``chat.render``.

        chat_template: jinja text or the name of one of the model's templates, instead of its own.
        Raises TemplateError when there is no template or it fails, ValueError for bad arguments.
        """
        return chat.render(
            self.template_for(chat_template, tools),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            variables={**self.named, **variables},
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a conversation; ``options`` are ``render_chat``'s.

        No special token is added: a template writes its own BOS, and a second one would be wrong.
        """
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def template_for(
        self, asked: str | None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The template that ``render_chat`` would use. Raises TemplateError when there is none."""
        templates = self.chat_template
        if isinstance(templates, Mapping):
            if asked is not None:
                return templates.get(asked, asked)
            for name in ("tool_use", "default") if tools is not None else ("default",):
                if name in templates:
                    return templates[name]
            raise TemplateError(
                f"this model has several chat templates and no default: name one as chat_template "
                f"({', '.join(sorted(templates))})"
            )
        if asked is not None:
            return asked
        if templates is None:
            raise TemplateError(
                "this model has no chat template (it is probably a base model): send plain prompts, "
                "or give a template as chat_template"
            )
        return templates

    def has_double_bos(self, ids: Sequence[int]) -> bool:
        """Whether a prompt begins with two BOS: text that had one was encoded with another."""
        bos = self.bos_token_id
        return bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a resolved model.

    A GGUF vocabulary is converted once and kept in ``files.derived_dir``. Raises TokenizerError
    when there is none or it is of an unknown kind.
    """
    return _from_gguf(files) if files.kind == "gguf" else _from_folder(files.path)


def _from_gguf(files: ModelFiles) -> Tokenizer:
    identity = {"converter": _CONVERTER_VERSION, **file_identity(files.path)}
    kept = files.derived_dir
    if kept is not None and (kept / "tokenizer.json").is_file():
        try:
            settings = read_json(kept / "tokenizer_settings.json")
            if settings["identity"] == identity:
                return _assemble(_read_backend(kept / "tokenizer.json"), settings)
        except (OSError, KeyError, ValueError):
            pass  # damaged: made again below
    from octavo.core.loading.gguf import GgufFile
    from octavo.core.loading.gguf_tokenizer import convert_tokenizer

    file = GgufFile(files.path)
    try:
        backend, settings = convert_tokenizer(file)
    finally:
        file.close()
    if kept is not None:
        try:
            write_atomically(kept / "tokenizer.json", backend.to_str().encode())
            record = json.dumps({"identity": identity, **settings})
            write_atomically(kept / "tokenizer_settings.json", record.encode())
        except OSError:
            pass  # a read-only cache costs the next start its conversion, nothing else
    return _assemble(backend, settings)


def _from_folder(folder: Path) -> Tokenizer:
    settings = _optional(folder / "tokenizer_config.json")
    for name, token in _optional(folder / "special_tokens_map.json").items():
        settings.setdefault(name, token)
    settings["chat_template"] = _template(folder, settings)
    if (folder / "tokenizer.json").is_file():
        return _assemble(_read_backend(folder / "tokenizer.json"), settings)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError(
            f"{folder} has no tokenizer.json. Its other tokenizer files are read by transformers: "
            "pip install 'octavo[hf]' (and sentencepiece), or add a tokenizer.json."
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(
            folder, use_fast=True, trust_remote_code=False, local_files_only=True
        )
        backend = loaded.backend_tokenizer
    except Exception as error:  # transformers raises anything here
        raise TokenizerError(
            f"{folder} has no tokenizer.json, and transformers cannot build one from what is there "
            f"({type(error).__name__}: {error}). Add a tokenizer.json (save_pretrained of a fast "
            "tokenizer writes it)."
        ) from error
    return _assemble(backend, settings)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(
            f"{path} is no tokenizer the tokenizers library reads: {error}"
        ) from error


def _assemble(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken

    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and backend.token_to_id(value) is not None:
            named[name] = value
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    unmarked = [token for token in dict.fromkeys(named.values()) if token not in added]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in unmarked])
    _apply_bos_eos(backend, settings, named)
    return Tokenizer(
        backend,
        named=named,
        chat_template=settings.get("chat_template"),
        vocab_size=settings.get("vocab_size"),
    )


def _apply_bos_eos(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Where tokenizer_config.json says whether to add BOS and EOS, it outranks tokenizer.json."""
    from tokenizers import processors

    if not isinstance(settings.get("add_bos_token"), bool) and not isinstance(
        settings.get("add_eos_token"), bool
    ):
        return
    bos = named.get("bos_token") if settings.get("add_bos_token") else None
    eos = named.get("eos_token") if settings.get("add_eos_token") else None
    pairs = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    if backend.encode("").ids == [token_id for _, token_id in pairs]:
        return
    single = ([f"{bos}:0"] if bos else []) + ["$A:0"] + ([f"{eos}:0"] if eos else [])
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join(single), special_tokens=pairs
    )


def _template(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    named: dict[str, str] = {}
    own = folder / "chat_template.jinja"
    if own.is_file():
        named["default"] = own.read_text(encoding="utf-8")
    elif (folder / "chat_template.json").is_file():
        named["default"] = read_json(folder / "chat_template.json")["chat_template"]
    else:
        stated = settings.get("chat_template")
        if isinstance(stated, list):
            named.update({item["name"]: item["template"] for item in stated})
        elif isinstance(stated, str):
            named["default"] = stated
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    return named["default"] if list(named) == ["default"] else named or None


def _optional(path: Path) -> dict[str, Any]:
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return value


def _is_byte_token(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[DecoderKind, bool]:
    """How the decoder makes text, and whether it drops one leading space.

    The two kinds whose text is the tokens' bytes in a row are told by their exact make; any other
    decoder is "generic".
    """
    decoder = backend.decoder
    if decoder is None:
        return "generic", False
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return "byte_level", False
    replaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if parts[:3] == [replaces, {"type": "ByteFallback"}, {"type": "Fuse"}] and parts[3:] in (
        [],
        [strip],
    ):
        return "byte_fallback", parts[3:] == [strip]
    return "generic", False
