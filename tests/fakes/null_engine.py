"""An engine without a model, and a tokenizer of bytes: what the entry tests run against.

Token i of a sample's output is byte i of a fixed sentence, or of what follows "say:" in the prompt;
then EOS. So every expected text can be written down. A line break is said by ␤. NULL_ENGINE_TEMPLATE in
the environment is another chat template, NULL_ENGINE_SPECIAL has further special tokens.

A prompt's embedding is its first eight token ids. NULL_ENGINE_TASKS: what it is for.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import tokenizers

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.engine import ModelInfo
from octavo.core.entry.front import Front
from octavo.core.loading.gguf_tokenizer import byte_alphabet
from octavo.core.loading.tokenizer import Tokenizer
from octavo.core.params import ParamError, RequestRefused
from octavo.core.pooling import EmbeddingInfo
from octavo.core.types import Request, SequenceUpdate, Timings, TokenLogprobs

BOS, EOS, FIRST_BYTE = 1, 2, 3
VOCAB = FIRST_BYTE + 256
SENTENCE = "The quick brown fox jumps over the lazy dog. "


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """One token per byte of UTF-8, BOS in front of plain prompts, a chat template that writes it."""
    alphabet = byte_alphabet()
    vocabulary = {"<unk>": 0, "<s>": BOS, "</s>": EOS}
    vocabulary |= {alphabet[byte]: FIRST_BYTE + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    further = os.environ.get("NULL_ENGINE_SPECIAL", "").split()
    backend.add_special_tokens(["<unk>", "<s>", "</s>", *further])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return Tokenizer(
        backend,
        named={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=os.environ.get("NULL_ENGINE_TEMPLATE", TEMPLATE),
    )


@functools.cache
def _script(said: str | None) -> list[int]:
    plain = byte_tokenizer().encode(SENTENCE * 1000 if said is None else said, False)
    return plain + ([] if said is None else [EOS])


class _Running:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.text = byte_tokenizer().decode(request.prompt_token_ids)
        written = byte_tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False)
        _, found, said = written.rpartition("say:")
        self.script = _script(said.split("\n")[0].replace("␤", "\n") if found else None)
        self.open = set(range(request.params.n))
        self.done = 0
        self.timings = Timings(queued=time.monotonic())


class NullEngine:
    """`core.engine.Engine`'s surface. NULL_ENGINE_* in the environment make it slow or fail."""

    def __init__(self, config: EngineConfig) -> None:
        self.info = ModelInfo(
            name="null",
            architecture="Null",
            backend="null",
            kv_dtype="float32",
            kv_bytes=1,
            weight_bytes=1,
            max_num_batched_tokens=512,
            max_model_len=config.max_model_len or 4096,
            vocab_size=byte_tokenizer().vocab_size,
            eos_token_ids=(EOS,),
            dtype="float32",
            device="null",
            device_reason="the tests' own",
            block_size=16,
            num_kv_blocks=1000,
            max_num_seqs=config.max_num_seqs,
            phases={"weights": 0.01},
            capabilities={"dtypes": ("float32",), "seeded_sampling": True},
            tasks=tuple(os.environ.get("NULL_ENGINE_TASKS", "generate embed").split()),  # type: ignore[arg-type]
            embedding=EmbeddingInfo(
                pooling="mean",
                normalize=False,
                source="the tests",
                size=8,
                dimensions=(2, 4),
                max_tokens=256,
            ),
            not_a_task="the null engine was told not to",
        )
        self._running: dict[str, _Running] = {}
        self._seen: set[str] = set()
        self._steps = 0
        self._pause = float(os.environ.get("NULL_ENGINE_STEP_SECONDS", "0"))

    def add(self, request: Request) -> None:
        request.params.check_vocabulary(self.info.vocab_size)
        if request.id in self._seen:
            raise AssertionError(f"id {request.id} was used before")
        self._seen.add(request.id)
        text = byte_tokenizer().decode(request.prompt_token_ids)
        if "refuse me" in text:
            raise RequestRefused("prompt", "needs 9 KV blocks, there are 5")
        if "bad param" in text:
            raise ParamError("top_k", "top_k is not to its liking")
        self._running[request.id] = _Running(request)

    def abort(self, ids: Iterable[Any]) -> list[SequenceUpdate]:
        updates = []
        for item in ids:
            name, index = (item, None) if isinstance(item, str) else item
            if (running := self._running.get(name)) is None:
                continue
            for i in sorted(running.open if index is None else running.open & {index}):
                running.open.discard(i)
                updates.append(SequenceUpdate(request_id=name, index=i, finish_reason="abort"))
            if not running.open:
                del self._running[name]
        return updates

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def step(self) -> list[SequenceUpdate]:
        if self._pause:
            time.sleep(self._pause)
        self._steps += 1
        updates: list[SequenceUpdate] = []
        for name, running in list(self._running.items()):
            updates += self._step_one(running)
            if not running.open:
                del self._running[name]
        return updates

    def _step_one(self, running: _Running) -> list[SequenceUpdate]:
        request, params = running.request, running.request.params
        token = running.script[running.done]
        if "crash now" in running.text:
            os._exit(7)
        if "stall now" in running.text:
            time.sleep(float(os.environ.get("NULL_ENGINE_STALL_SECONDS", "3")))
            running.script = [EOS]
            token = EOS
        if "raise now" in running.text:
            raise FloatingPointError("the step failed")
        first, running.done = running.done == 0, running.done + 1
        reason: Any = None
        tokens = [token]
        if params.max_tokens == 0:
            tokens, reason = [], "length" if request.pooling is None else "stop"
        elif token == EOS and not params.ignore_eos:
            reason = "stop"
        elif running.done >= (params.max_tokens or 10**9):
            reason = "length"
        times = running.timings
        times.last_token = times.finished = time.monotonic()
        if first:
            times.scheduled = times.last_token
            times.first_token = times.last_token if tokens else 0.0
        prompt_logprobs = None
        if first and params.prompt_logprobs is not None:
            prompt_logprobs = [
                _logprobs(t, params.prompt_logprobs) for t in request.prompt_token_ids[1:]
            ]
        updates = [
            SequenceUpdate(
                request_id=request.id,
                index=i,
                token_ids=tokens,
                finish_reason=reason,
                logprobs=(
                    None
                    if params.logprobs is None
                    else [_logprobs(t, params.logprobs) for t in tokens]
                ),
                prompt_logprobs=prompt_logprobs if i == min(running.open) else None,
                num_cached_tokens=16 if request.cache_salt is None and first else 0,
                timings=times if first or reason else None,
                embedding=_embedding(request),
            )
            for i in sorted(running.open)
        ]
        if reason:
            running.open.clear()
        return updates

    def stats(self) -> Any:
        return NullStats(running=len(self._running), steps=self._steps)

    def shutdown(self) -> None:
        self._running.clear()


def _embedding(request: Request) -> bytes | None:
    pooling = request.pooling
    if pooling is None or "embed nothing" in byte_tokenizer().decode(request.prompt_token_ids):
        return None
    row = np.zeros(8)
    row[: len(request.prompt_token_ids)] = request.prompt_token_ids[:8]
    row = row[: pooling.dimensions]
    if pooling.dimensions is not None or pooling.normalize:
        row /= np.linalg.norm(row)
    return row.astype("<f4").tobytes()


class NullStats(msgspec.Struct):
    running: int = 0
    waiting: int = 0
    steps: int = 0


def _logprobs(token: int, k: int) -> TokenLogprobs:
    others = [t for t in (FIRST_BYTE + 97 + i for i in range(26)) if t != token][: max(k - 1, 0)]
    ids = ([token, *others])[:k]
    values = [-0.5, *[float("-inf") if i == 1 else -2.0 - i for i in range(len(others))]][:k]
    return TokenLogprobs(token, -0.5, 1, ids, values)


def build(config: EngineConfig, progress: Any = None, **_: Any) -> NullEngine:
    """What the engine process calls in place of `wiring.build_engine`."""
    if config.model == "no-such-model":
        raise ConfigError("no model of that name")
    if progress is not None:
        task = progress.task("loading nothing", 10)
        task.advance(10)
        task.close()
    time.sleep(float(os.environ.get("NULL_ENGINE_LOAD_SECONDS", "0")))
    return NullEngine(config)


def load(config: EngineConfig, progress: Any = None) -> Front:
    """What the front calls in place of `front.load_front`."""
    return Front("null", byte_tokenizer(), {})
