"""What a model is started for: generating, embedding, or both, and how it embeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.contract import Capabilities, ExecutionPlan, Limits
from octavo.core.lanes import LaneSet
from octavo.core.loading.errors import ModelConfigError
from octavo.core.loading.files import ModelFiles
from octavo.core.loading.sentence_transformers import SentenceModules, sentence_modules
from octavo.core.pooling import EmbeddingInfo, PoolingKind, Task

if TYPE_CHECKING:
    from octavo.core.entry.design import Design
    from octavo.core.models.base import Model


@dataclass(frozen=True)
class Tasks:
    """names: what may be asked of the engine. reason: why the other task is none of them. modules: what the
    checkpoint says of embedding."""

    names: tuple[Task, ...]
    reason: str = ""
    modules: SentenceModules = field(default_factory=SentenceModules)


def choose_tasks(
    config: EngineConfig,
    files: ModelFiles,
    model_config: Mapping[str, Any],
    cls: type[Model],
    capabilities: Capabilities,
    device: str,
    notes: list[str],
) -> Tasks:
    """What `--task` asks for, as far as model and device can.

    Raises:
        ConfigError, ModelError: they cannot.
    """
    name, asked = cls.__name__, config.task
    if not cls.generates and asked == "generate":
        raise ConfigError(
            f"--task generate: {name} has no head to generate text with; it embeds. Leave --task out"
        )
    if not cls.generates and config.speculative_config is not None:
        raise ConfigError(
            f"--speculative-config drafts text, and {name} generates none; leave it out"
        )
    if cls.bidirectional and not capabilities.encoders:
        raise ConfigError(
            f"{name} is an encoder, and {device} has no attention for encoders; use --device cpu"
        )
    if asked == "generate":
        if config.pooling != "auto":
            raise ConfigError(
                f"--pooling {config.pooling} needs embeddings, which --task generate leaves out"
            )
        return Tasks(
            ("generate",),
            "this engine was started with --task generate; start it without for embeddings",
        )
    must = asked == "embed" or not cls.generates
    if capabilities.shapes == "static":
        why = f"{device} runs only programs that are compiled for generating: it embeds nothing"
        if must:
            raise ConfigError(f"{why}; use --device cpu")
        return Tasks(("generate",), why)
    pooling = None if config.pooling == "auto" else cast(PoolingKind, config.pooling)
    try:
        modules = sentence_modules(files, model_config, pooling)
    except ModelConfigError as error:
        if must or pooling is not None:
            raise
        notes.append(f"no embeddings: {error}")
        return Tasks(("generate",), f"this engine embeds nothing: {error}")
    if modules.default_prompt:
        notes.append(
            f"the checkpoint's default prompt {modules.default_prompt!r} is not put in front of texts to "
            "embed: send it with them"
        )
    if not cls.generates:
        notes.append(f"{name} embeds prompts and generates nothing")
        why = (
            f"this model ({name}) has no head to generate text with: it embeds prompts (/v1/embeddings, "
            "LLM.embed). Use a generative model for completions, chats and responses"
        )
        return Tasks(("embed",), why, modules)
    if asked == "embed":
        why = "this engine was started with --task embed; start it without to generate text"
        return Tasks(("embed",), why, modules)
    return Tasks(("generate", "embed"), modules=modules)


def task_facts(config: EngineConfig, made: Design, max_len: int) -> dict[str, Any]:
    """The fields of `ModelInfo` that tell of tasks."""
    tasks = made.tasks
    whole = LaneSet(made.plan.lanes, made.plan.max_logits_rows).longest_whole
    longest = max_len if whole is None else min(max_len, whole)
    embedding = None
    if "embed" in tasks.names:
        embedding = _embedding(config, tasks.modules, made, longest)
    return {"tasks": tasks.names, "embedding": embedding, "not_a_task": tasks.reason}


def _embedding(
    config: EngineConfig, modules: SentenceModules, made: Design, longest: int
) -> EmbeddingInfo:
    """How prompts of at most `longest` tokens are embedded. A checkpoint that says nothing of it is pooled
    by the last token if it is a decoder, by the mean if it is an encoder, and the embedding is normalised."""
    encoder, size = made.model_class.bidirectional, made.shape.hidden_size
    pooling: PoolingKind = "mean" if encoder else "last"
    source = f"the default of {'an encoder' if encoder else 'a decoder'}"
    if config.pooling != "auto":
        pooling, source = cast(PoolingKind, config.pooling), "--pooling"
    elif modules.pooling is not None:
        pooling, source = modules.pooling, "modules.json"
    dimensions = modules.dimensions
    if dimensions:
        dimensions = tuple(n for n in dimensions if 0 < n < size) or None
    return EmbeddingInfo(
        pooling=pooling,
        normalize=True if modules.normalize is None else modules.normalize,
        source=source,
        size=size,
        dimensions=dimensions,
        max_tokens=min(longest, modules.max_tokens or longest),
        lowercase=modules.lowercase,
    )


# Encoders: a prompt is computed whole, and nothing of it is kept.


def uncut_limits(cls: type[Model], limits: Limits) -> Limits:
    """For an encoder a step has room for the longest prompt, unless the user says how much it has."""
    if not cls.bidirectional or limits.max_num_batched_tokens is not None:
        return limits
    return replace(limits, max_num_batched_tokens=max(512, limits.max_model_len))


def uncut(cls: type[Model], plan: ExecutionPlan) -> ExecutionPlan:
    """For an encoder no lane cuts a prompt."""
    if not cls.bidirectional:
        return plan
    return replace(plan, lanes=tuple(replace(lane, chunked=False) for lane in plan.lanes))


def refuse_cache(config: EngineConfig, cls: type[Model]) -> None:
    """Raises ConfigError: an encoder's KV cache is given a size."""
    for name in ("num_kv_blocks", "kv_memory", "kv_fraction"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} sizes a KV cache, and {cls.__name__}, an encoder, keeps none; "
                "leave it out"
            )
