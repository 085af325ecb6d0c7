"""Embeddings for callers: what they may ask for, prompts made ready, and what they get."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from octavo.core.engine import ModelInfo
from octavo.core.entry.inputs import InputProcessor, Prompt, PromptInput, check_cache_salt
from octavo.core.params import ParamError, RequestOutputKind, SamplingParams
from octavo.core.pooling import EmbeddingInfo, Pooling
from octavo.core.types import Request, RequestOutput, Timings

_NOTHING = SamplingParams(
    max_tokens=0, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
"""How the engine knows that nothing is to be drawn."""


class EmbeddingFailed(RuntimeError):
    """A prompt was not embedded: the request was aborted, or its step failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What an embedding may be asked to be. Names are vLLM's.

    dimensions: so many numbers, the first ones, brought to length 1; only where the checkpoint was trained
    for it (Matryoshka). normalize: to length 1; None: as the model's modules do.
    truncate_prompt_tokens: keep the first so many tokens of a longer prompt, special ones included; -1: as
    many as the model takes. None: a longer prompt is refused.

    Raises:
        ParamError: a value of a wrong type or below its range.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and not (_whole(self.dimensions) and self.dimensions > 0):
            raise ParamError(
                "dimensions", f"dimensions must be a whole number above 0, got {self.dimensions!r}"
            )
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise ParamError(
                "normalize", f"normalize must be True or False, got {self.normalize!r}"
            )
        keep = self.truncate_prompt_tokens
        if keep is not None and not (_whole(keep) and (keep == -1 or keep > 0)):
            raise ParamError(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens must be -1 (what the model takes) or at least 1, got {keep!r}",
            )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One embedding. Names are vLLM's. `data` holds the same numbers as little-endian float32."""

    data: bytes

    @property
    def embedding(self) -> list[float]:
        """The numbers."""
        values: list[float] = self.array.tolist()
        return values

    @property
    def array(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The numbers as float32 [size]; not to be written to."""
        return np.frombuffer(self.data, "<f4")

    @property
    def hidden_size(self) -> int:
        """How many numbers there are."""
        return len(self.data) // 4


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """What a caller of `LLM.embed` or `AsyncLLM.embed` receives for one prompt. Names are vLLM's."""

    request_id: str
    outputs: EmbeddingOutput
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    metrics: Timings | None = None
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """The embedding out of a request's last output.

        Raises:
            EmbeddingFailed: it has none.
        """
        if output.embedding is None:
            [sample] = output.outputs
            if sample.finish_reason == "error":
                raise EmbeddingFailed(f"embedding failed: {sample.stop_reason}")
            raise EmbeddingFailed("the request was aborted")
        return cls(
            request_id=output.request_id,
            outputs=EmbeddingOutput(output.embedding),
            prompt=output.prompt,
            prompt_token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
            metrics=output.metrics,
        )


class Embedder:
    """Turns prompts into requests for embeddings, for one model. Shared by `LLM`, `AsyncLLM` and the
    server; all checks that need no engine are made here."""

    def __init__(self, inputs: InputProcessor, info: ModelInfo) -> None:
        self._inputs, self._model = inputs, info

    @property
    def info(self) -> EmbeddingInfo:
        """How the model embeds.

        Raises:
            ParamError: it does not, and why.
        """
        if self._model.embedding is None:
            raise ParamError("model", self._model.not_a_task or "this model embeds nothing")
        return self._model.embedding

    def prompt(
        self,
        prompt: PromptInput | Prompt,
        params: PoolingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Prompt:
        """One prompt as token ids, cut where `params` say so.

        Raises:
            ParamError: as `InputProcessor.tokenize`; also a prompt that is too long.
        """
        info = self.info
        most = self._most(info, params)
        if isinstance(prompt, Prompt):
            ready = prompt
        elif info.lowercase:
            ready = self._inputs.tokenize(_lowered(prompt), add_special_tokens=add_special_tokens)
        else:
            ready = self._inputs.tokenize(prompt, add_special_tokens=add_special_tokens)
        if most is None or len(ready.token_ids) <= most:
            return ready
        return Prompt(self._cut(ready, most, add_special_tokens), ready.text, ready.cache_salt)

    def _most(self, info: EmbeddingInfo, params: PoolingParams | None) -> int | None:
        """Tokens to cut longer prompts to; None: they are not cut."""
        keep = params.truncate_prompt_tokens if params is not None else None
        if keep is None:
            return None
        if keep > info.max_tokens:
            raise ParamError(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens is {keep}; this model embeds at most {info.max_tokens} tokens",
            )
        return info.max_tokens if keep == -1 else keep

    def _cut(self, prompt: Prompt, most: int, special: bool) -> list[int]:
        """The first `most` tokens. A text's special tokens stay around what is left of it."""
        if prompt.text is None or not special:
            return prompt.token_ids[:most]
        backend = self._inputs.tokenizer.backend
        around = backend.num_special_tokens_to_add(False)
        if around >= most:
            raise ParamError(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens is {most}, and the special tokens around a text are {around}",
            )
        text = prompt.text.lower() if self.info.lowercase else prompt.text
        encoding = backend.encode(text, add_special_tokens=False)
        encoding.truncate(most - around)
        ids: list[int] = backend.post_process(encoding, add_special_tokens=True).ids
        return ids

    def request(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """The engine's request for a prompt of `prompt()`.

        Raises:
            ParamError: a parameter that this model cannot honour, or a prompt that is too long.
        """
        info = self.info
        if len(prompt.token_ids) > info.max_tokens:
            raise ParamError(
                "input",
                f"the input has {len(prompt.token_ids)} tokens; this model embeds at most "
                f"{info.max_tokens}. Shorten it, or set truncate_prompt_tokens to -1",
            )
        check_cache_salt(cache_salt)
        made = self._inputs.request(prompt, _NOTHING, priority=priority, cache_salt=cache_salt)
        return msgspec.structs.replace(made, pooling=self._pooling(info, params))

    @staticmethod
    def _pooling(info: EmbeddingInfo, params: PoolingParams | None) -> Pooling:
        normalize = info.normalize
        if params is None:
            return Pooling(info.pooling, normalize)
        if params.normalize is not None:
            normalize = params.normalize
        size = params.dimensions
        if size is None or size == info.size:
            return Pooling(info.pooling, normalize)
        if info.dimensions is None:
            raise ParamError(
                "dimensions",
                f"dimensions={size}: this model's embeddings have {info.size} numbers, and its checkpoint "
                "does not say that they may be cut (is_matryoshka, matryoshka_dimensions); leave it out",
            )
        if size > info.size or (info.dimensions and size not in info.dimensions):
            can = ", ".join(map(str, info.dimensions)) or f"1 to {info.size}"
            raise ParamError(
                "dimensions", f"dimensions={size} is none of this model's: {can} or {info.size}"
            )
        return Pooling(info.pooling, normalize, size)


def _lowered(prompt: PromptInput) -> PromptInput:
    """A prompt with its text, if it is one, in lower case."""
    if isinstance(prompt, str):
        return prompt.lower()
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str):
        return {**prompt, "prompt": prompt["prompt"].lower()}
    return prompt


Params = PoolingParams | Sequence[PoolingParams] | None


def params_for(params: Params, count: int) -> list[PoolingParams | None]:
    """One for each of `count` prompts, of one for all or one for each.

    Raises:
        ParamError: they are of another number or type.
    """
    if params is None or isinstance(params, PoolingParams):
        return list(itertools.repeat(params, count))
    each = list(params) if isinstance(params, Sequence) else [params]
    if wrong := [one for one in each if not isinstance(one, PoolingParams)]:
        raise ParamError(
            "pooling_params", f"pooling_params must be PoolingParams, got {type(wrong[0]).__name__}"
        )
    if len(each) != count:
        raise ParamError(
            "pooling_params",
            f"{len(each)} pooling_params for {count} prompts: give one, or one for each",
        )
    return list(each)
