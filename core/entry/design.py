"""What is decided before any weight is read, and how large the KV cache may be behind them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.contract import Backend, ExecutionPlan, Limits, ModelShape, Ops
from octavo.core.entry import tasks as tasking
from octavo.core.entry.numbers import Numbers, choose_numbers
from octavo.core.lanes import LaneError, LaneSet
from octavo.core.loading.errors import ModelConfigError, ModelError
from octavo.core.loading.files import ModelFiles
from octavo.core.models.base import ARCHITECTURES, Model, model_class
from octavo.core.quantization import SCHEMES, Placement, place
from octavo.plugins.manager import Resolved, plugins

if TYPE_CHECKING:
    from octavo.core.quantization.base import Scheme

DEFAULT_KV_BYTES = 4 << 30
DEFAULT_KV_FRACTION = 0.5


@dataclass
class Phases:
    """How long each phase of a start took, in seconds."""

    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass(frozen=True)
class Design:
    """What is decided before any weight is read: which class runs the model, in what dtype, within
    which limits, and how the backend will be driven."""

    resolved: Resolved
    model_class: type[Model]
    model_config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    dtype: str
    scheme: Scheme | None
    shape: ModelShape
    limits: Limits
    plan: ExecutionPlan
    tasks: tasking.Tasks
    kept: Scheme | None = None  # where the checkpoint has weights in codes that a device may keep


def design(config: EngineConfig, files: ModelFiles, resolved: Resolved, phases: Phases) -> Design:
    """Decides all that needs the model's configuration and the backend, and nothing more.

    Raises:
        ConfigError, ModelError: what was asked, what is possible, and what to change.
    """
    backend, device = resolved.backend, resolved.device
    model_config, eos = _read_config(files)
    cls = model_class(model_config, {**ARCHITECTURES, **plugins().models()})
    numbers = choose_numbers(
        config,
        model_config,
        backend.capabilities(device),
        device,
        {**SCHEMES, **plugins().quantization_schemes()},
    )
    phases.notes.extend(numbers.notes)
    dtype, kv_dtype = numbers.dtype, numbers.kv_dtype
    with _reading_config(files):
        shape = cls.shape(model_config, kv_dtype)
        if shape.max_position < 1 or shape.num_layers < 1:
            raise ValueError("max_position_embeddings and num_hidden_layers must be at least 1")
    if beyond := [token for token in eos if not 0 <= token < shape.vocab_size]:
        phases.notes.append(
            f"EOS {beyond}: no tokens of this model, whose ids are 0 to {shape.vocab_size - 1}"
        )
        eos = tuple(token for token in eos if token not in beyond)
    capabilities = backend.capabilities(device)
    tasks = tasking.choose_tasks(
        config, files, model_config, cls, capabilities, device, phases.notes
    )
    limits = tasking.uncut_limits(cls, _limits(config, shape, dtype, kv_dtype, phases))
    plan = _validated(backend.plan(shape, device, limits), shape, backend, device, config)
    plan = tasking.uncut(cls, plan)
    phases.notes += [f"backend {backend.name!r}: {text}" for text in plugins().deprecated_in(plan)]
    return Design(
        *(resolved, cls, model_config, eos, dtype, numbers.scheme, shape, limits, plan, tasks),
        kept=_kept(config, files, numbers) if capabilities.kept_codes else None,
    )


def _kept(config: EngineConfig, files: ModelFiles, numbers: Numbers) -> Scheme | None:
    """Only beside float32: in any other dtype the numbers that the codes stand for would be rounded."""
    if files.kind != "gguf" or not config.keep_codes:
        return None
    if numbers.scheme is not None or numbers.dtype != "float32":
        return None
    from octavo.core.loading.gguf_weights import GgufWeights
    from octavo.core.quantization.kept import Kept

    weights = GgufWeights(files.path)
    try:
        return Kept(weights.forms())
    finally:
        weights.close()


def _read_config(files: ModelFiles) -> tuple[dict[str, Any], tuple[int, ...]]:
    from octavo.core.loading.hf_config import eos_token_ids, load_config, load_generation_config

    config = load_config(files)
    with _reading_config(files):
        return config, eos_token_ids(config, load_generation_config(files))


def make_model(made: Design, files: ModelFiles, ops: Ops) -> Model:
    """The model, without weights. Raises ConfigError, ModelError: its config cannot be used."""
    with _reading_config(files):
        return made.model_class(made.model_config, made.shape, ops)


@contextmanager
def _reading_config(files: ModelFiles) -> Iterator[None]:
    """A setting that is missing or of a wrong type becomes an error that names the file."""
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except KeyError as error:
        raise ModelConfigError(f"the config of {files.path} lacks {error}") from error
    except (TypeError, ValueError, ZeroDivisionError, IndexError, AttributeError) as error:
        raise ModelConfigError(
            f"the config of {files.path} has a value that cannot be used ({error})"
        ) from error


def place_weights(made: Design, model: Model, phases: Phases) -> Placement:
    """The form of each of the model's weights on the device."""
    capabilities = made.resolved.backend.capabilities(made.resolved.device)
    if made.kept is None or not capabilities.kept_codes:
        placed = place(model.specs(), made.scheme, capabilities.quantization)
    else:
        placed = place(model.specs(), made.kept, capabilities.kept_codes)
        kept = sum(spec.scheme is not None for spec in placed.specs)
        if kept:
            phases.notes.append(
                f"{kept} of {len(placed.specs)} weights stay in the checkpoint's codes, with the results of "
                f"{made.dtype}"
            )
    phases.notes.extend(placed.notes)
    return placed


def _limits(
    config: EngineConfig, shape: ModelShape, dtype: str, kv_dtype: str, phases: Phases
) -> Limits:
    longest = config.max_model_len or shape.max_position
    if longest > shape.max_position:
        raise ConfigError(
            f"--max-model-len {longest} exceeds the model's {shape.max_position} positions; "
            f"use at most {shape.max_position}"
        )
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_model_len=longest,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        threads=config.threads,
        batch_invariant=config.batch_invariant,
        op_providers=config.op_providers,
    )


def _validated(
    plan: ExecutionPlan, shape: ModelShape, backend: Backend, device: str, config: EngineConfig
) -> ExecutionPlan:
    """A backend proposes a plan; this says whether it can be carried out."""
    capabilities = backend.capabilities(device)
    who = f"backend {backend.name!r} on {device}"
    if config.batch_invariant and not capabilities.batch_invariant:
        raise ConfigError(f"{who} does not offer --batch-invariant; leave it out")
    if plan.block_size not in capabilities.block_sizes:
        sizes = ", ".join(map(str, capabilities.block_sizes))
        raise ConfigError(
            f"--block-size {plan.block_size} is not offered by {device}; it has {sizes}"
        )
    if config.block_size is not None and plan.block_size != config.block_size:
        raise ConfigError(
            f"{who} cannot use --block-size {config.block_size} for this model; it proposes {plan.block_size}"
        )
    for spec in shape.kv:
        for size in {spec.head_size, spec.head_size_v}:
            if capabilities.refuses_head_size(size):
                low, high, step = capabilities.head_sizes
                raise ConfigError(
                    f"{who} has no attention for head size {size}; it takes multiples of {step} "
                    f"from {low} to {high}. --device reference takes any"
                )
    _check_rows(plan, config, who)
    if plan.layout == "ranks" and plan.world_size != 1:  # "spmd" is one process, too
        raise ConfigError(f"{who} asks for {plan.world_size} ranks; this engine runs one")
    return plan


def _check_rows(plan: ExecutionPlan, config: EngineConfig, who: str) -> None:
    """Raises ConfigError: lanes that cannot be driven, or too few rows of logits for a step of theirs."""
    try:
        lanes = LaneSet(plan.lanes, plan.max_logits_rows)
    except LaneError as error:
        raise ConfigError(f"{who} proposes a plan that cannot be carried out: {error}") from error
    seqs = min(config.max_num_seqs, max(lane.max_seqs for lane in plan.lanes))
    if plan.max_logits_rows <= seqs and any(mode.shared for mode in lanes.modes):
        raise ConfigError(
            f"{who} computes {plan.max_logits_rows} rows of logits in a step, and {seqs} sequences may "
            f"each draw from one: use --max-num-seqs {plan.max_logits_rows - 1} or less"
        )


def weight_bytes(placed: Placement, ops: Ops, dtype: str) -> int:
    """Bytes of a model's weights on a device; a tied one counts once."""
    names = {spec.name for spec in placed.specs}
    own = (spec for spec in placed.specs if spec.alias not in names)
    return sum(ops.weight_bytes(spec, dtype) for spec in own)


def kv_block_bytes(made: Design, ops: Ops) -> int:
    """Bytes of one block over all layers."""
    size = made.plan.block_size
    return sum(len(spec.layers) * ops.kv_block_bytes(spec, size) for spec in made.shape.kv)


def size_kv(config: EngineConfig, made: Design, ops: Ops, free: int) -> tuple[int, int]:
    """(blocks, bytes of a block over all layers), within `free` bytes beside the weights.

    Raises:
        ConfigError: they cannot hold a cache, or not the one asked for.
    """
    plan, limits, device = made.plan, made.limits, made.resolved.device
    per_block = kv_block_bytes(made, ops)
    most = 1 + limits.max_num_seqs * -(-limits.max_model_len // plan.block_size)
    if not per_block:  # an encoder's blocks are only counted
        tasking.refuse_cache(config, made.model_class)
        return most, 0
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks, per_block
    if config.kv_memory is not None:
        budget = config.kv_memory
        if budget > free:
            raise ConfigError(
                f"--kv-memory {budget:,} bytes exceed the {free:,} bytes free on {device} after loading"
            )
    else:
        budget = int(free * (config.kv_fraction or DEFAULT_KV_FRACTION))
        if config.kv_fraction is None:
            budget = min(budget, DEFAULT_KV_BYTES)
    blocks = budget // per_block
    blocks = min(blocks, most)  # more could never be used by running sequences
    if blocks < 2:
        raise ConfigError(
            f"{budget:,} bytes hold {blocks} KV blocks of {per_block:,} bytes; at least 2 are needed: "
            "give more with --kv-memory or --kv-fraction"
        )
    return blocks, per_block


def context_length(
    config: EngineConfig, limits: Limits, plan: ExecutionPlan, num_blocks: int, phases: Phases
) -> int:
    """The longest sequence: the model's context, or what the KV cache or a block table of the device
    holds when that is less."""
    widest = LaneSet(plan.lanes, plan.max_logits_rows).max_blocks
    pool = (num_blocks - 1) * plan.block_size
    if widest is not None and widest < num_blocks - 1:
        return _shortened(config, limits, widest * plan.block_size, phases)
    if limits.max_model_len <= pool:
        return limits.max_model_len
    if config.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} needs "
            f"{-(-config.max_model_len // plan.block_size)} KV blocks of {plan.block_size} tokens, the KV cache "
            f"has {num_blocks - 1}: lower it to {pool}, or give more with --kv-memory"
        )
    phases.notes.append(
        f"max_model_len {pool}: the KV cache holds no more (the model allows {limits.max_model_len})"
    )
    return pool


def _shortened(config: EngineConfig, limits: Limits, most: int, phases: Phases) -> int:
    """The model's context, or what the widest block table holds when that is less."""
    if limits.max_model_len <= most:
        return limits.max_model_len
    if config.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} exceeds what a sequence may have on this device, "
            f"whose widest block table holds {most} tokens: use at most {most}"
        )
    phases.notes.append(
        f"max_model_len {most}: the device's widest block table holds no more (the model allows "
        f"{limits.max_model_len})"
    )
    return most
