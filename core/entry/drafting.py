"""What `--speculative-config` asks for, made of the parts that build an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from octavo.core.blocks import BlockManager
from octavo.core.config import ConfigError, EngineConfig
from octavo.core.contract import ExecutionPlan, Ops, PackedWeight
from octavo.core.drafting.drafter import BY_MODEL, Drafter, SpeculativeConfig, make_drafter
from octavo.core.drafting.speculation import Speculation
from octavo.core.drafting.times import StepTimes, time_steps
from octavo.core.entry import design
from octavo.core.entry.vocabulary import vocabulary_of
from octavo.core.entry.wiring import resolve_model
from octavo.core.lanes import LaneSet, Room
from octavo.core.loading.files import ModelFiles
from octavo.core.loading.packing import load_weights
from octavo.core.loading.progress import Progress
from octavo.plugins.manager import plugins

if TYPE_CHECKING:
    from octavo.core.drafting.model import ModelDrafter
    from octavo.core.runner import Runner


@dataclass(frozen=True)
class Target:
    """The model that is drafted for. weights: packed ones and tables, by name. free: bytes of the device's
    memory that its KV cache leaves."""

    made: design.Design
    files: ModelFiles
    ops: Ops
    weights: Mapping[str, PackedWeight]
    num_blocks: int
    max_len: int
    free: int


def make_speculation(
    config: EngineConfig, target: Target, phases: design.Phases, progress: Progress
) -> Speculation | None:
    """None where no drafts are asked for.

    Raises:
        ConfigError, ModelError: they cannot be made, or not on this device.
    """
    if config.speculative_config is None:
        return None
    asked = SpeculativeConfig.parse(config.speculative_config)
    plan, device = target.made.plan, target.made.resolved.device
    if asked.method not in BY_MODEL:
        drafter: Drafter = make_drafter(asked, plugins().drafters())
    if not all(mode.shared for mode in LaneSet(plan.lanes, plan.max_logits_rows).modes):
        raise ConfigError(
            f"--speculative-config: a decode step of {device} takes one token of each sequence, and a draft "
            "has several; leave it out, or use a device whose steps are mixed, as --device cpu"
        )
    if asked.method == "self":
        drafter = _first_layers(config, asked, target, phases)
    elif asked.method == "draft_model":
        drafter = _second_model(config, asked, target, phases, progress)
    times = StepTimes() if asked.adaptive else None
    return Speculation(drafter, asked.num_speculative_tokens, times)


def time_target(
    speculation: Speculation | None, runner: Runner, target: Target, phases: design.Phases
) -> None:
    """Times the steps of the model that is drafted for, which decide about drafts. It has no requests yet."""
    if speculation is not None and speculation.times is not None:
        with phases("time steps"):
            plan = target.made.plan
            lane = _mixed_lane(plan)
            blocks, size = target.num_blocks, plan.block_size
            curve = time_steps(runner, blocks, size, lane, target.max_len)
            speculation.times.curve = curve


def _mixed_lane(plan: ExecutionPlan) -> Room:
    lane = LaneSet(plan.lanes, plan.max_logits_rows).modes[0].prompt
    assert lane is not None
    return lane


def _first_layers(
    config: EngineConfig, asked: SpeculativeConfig, target: Target, phases: design.Phases
) -> ModelDrafter:
    """The target's first layers, its last norm and its head, over the very weights of the target."""
    made = target.made
    most = made.shape.num_layers
    layers = asked.num_layers or max(1, most // 3)
    if layers > most:
        raise ConfigError(
            f"speculative_config.num_layers {layers}: the model has {most} layers; use at most {most}"
        )
    own = {**made.model_config, "num_hidden_layers": layers}
    shape = made.model_class.shape(own, made.plan.kv_dtype)
    if shape.num_layers != layers:
        raise ConfigError(
            f"speculative_config.method self: {made.model_class.__name__} cannot be cut to its first layers; "
            "use ngram or draft_model"
        )
    phases.notes.append(f"drafts: by the model's first {layers} of {most} layers")
    cut = replace(made, model_config=own, shape=shape)
    return _drafter(config, cut, target.files, target.weights, target, asked.adaptive)


def _second_model(
    config: EngineConfig,
    asked: SpeculativeConfig,
    target: Target,
    phases: design.Phases,
    progress: Progress,
) -> ModelDrafter:
    other = replace(
        config,
        model=asked.model or config.model,
        revision=None if asked.model else config.revision,
        quantization=asked.quantization,
        max_model_len=None,
        block_size=target.made.plan.block_size,
        speculative_config=None,
    )
    notes = design.Phases()  # what is said of the drafter's choices would read as the target's
    with phases("load drafter"):
        files = resolve_model(other, progress)
        try:
            made = design.design(other, files, target.made.resolved, notes)
        except ConfigError as error:
            raise ConfigError(f"speculative_config: of the drafter: {error}") from error
        _same_vocabulary(files, made, target)
        model = design.make_model(made, files, target.ops)
        placed = design.place_weights(made, model, notes)
        loaded = load_weights(
            *(model, placed, files, target.ops, made.dtype, progress, config.packed_cache)
        )
        weights = loaded.weights
        for name, table in model.tables(made.limits.max_model_len).items():
            weights[name] = table.to(target.ops.device)
    kind = f" in {made.scheme.name}" if made.scheme is not None else ""
    phases.notes.append(f"drafts: by {files.name}{kind}, {made.shape.num_parameters:,} parameters")
    taken = design.weight_bytes(placed, target.ops, made.dtype)
    target = replace(target, free=max(0, target.free - taken))
    return _drafter(other, made, files, weights, target, asked.adaptive)


def _same_vocabulary(files: ModelFiles, made: design.Design, target: Target) -> None:
    """Raises ConfigError: what differs."""
    from octavo.core.loading.tokenizer import load_tokenizer

    what = f"speculative_config.model {files.name}"
    hint = "a drafter needs the tokenizer of the model that it drafts for"
    own, theirs = made.shape.vocab_size, target.made.shape.vocab_size
    if own != theirs:
        raise ConfigError(
            f"{what} has a vocabulary of {own} tokens, {target.files.name} of {theirs}; {hint}"
        )
    mine = load_tokenizer(files).vocabulary_bytes(skip_special=False)
    other = load_tokenizer(target.files).vocabulary_bytes(skip_special=False)
    if len(mine) != len(other):
        raise ConfigError(
            f"{what} has a tokenizer of {len(mine)} tokens, {target.files.name} of {len(other)}; {hint}"
        )
    for token, (a, b) in enumerate(zip(mine, other, strict=True)):
        if a != b:
            raise ConfigError(
                f"{what}: its token {token} is {a!r}, that of {target.files.name} is {b!r}; {hint}"
            )


def _drafter(
    config: EngineConfig,
    made: design.Design,
    files: ModelFiles,
    weights: Mapping[str, PackedWeight],
    target: Target,
    adaptive: bool,
) -> ModelDrafter:
    """A runner over a KV cache for as many tokens as the target's has room for, if memory allows."""
    from octavo.core.drafting.model import ModelDrafter
    from octavo.core.runner import Runner

    ops, plan, backend = target.ops, made.plan, made.resolved.backend
    max_len = min(target.max_len, made.limits.max_model_len)
    # Sequences that share blocks in the target's cache do not here: all may be of their longest.
    wanted = min(
        target.num_blocks + config.max_num_seqs,
        1 + config.max_num_seqs * -(-(max_len + 1) // plan.block_size),
    )
    per_block = design.kv_block_bytes(made, ops)
    blocks = min(wanted, int(target.free * design.DEFAULT_KV_FRACTION) // per_block)
    if blocks < 2:
        raise ConfigError(
            f"--speculative-config: {target.free:,} bytes are left for the drafter's KV cache, a block of which "
            f"takes {per_block:,}: lower --kv-memory, or draft by ngram"
        )
    alloc_kv = partial(ops.alloc_kv, made.shape.kv, blocks, plan.block_size)
    runner = Runner(
        backend,
        made.resolved.device,
        ops,
        plan,
        design.make_model(made, files, ops),
        weights,
        alloc_kv(),
        alloc_kv,
        vocabulary_of(files, made.shape.vocab_size),
        len(made.shape.kv),
    )
    lane = _mixed_lane(plan)
    manager = BlockManager(blocks, plan.block_size, False, backend.pins_frees, ops.drain)
    curve = time_steps(runner, blocks, plan.block_size, lane, max_len) if adaptive else ()
    return ModelDrafter(runner, manager, lane, max_len, StepTimes(curve))
