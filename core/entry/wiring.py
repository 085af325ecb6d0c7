"""Where `--device` and MODEL become a running engine: the one place that knows all the rooms."""

from __future__ import annotations

import os
from functools import partial

from octavo.core.admission import SchedulerLimits
from octavo.core.blocks import BlockManager
from octavo.core.config import ConfigError, EngineConfig
from octavo.core.contract import Backend, Ops
from octavo.core.drafting.speculation import Speculation
from octavo.core.engine import Engine, ModelInfo
from octavo.core.entry import tasks as tasking
from octavo.core.entry.design import (
    Design,
    Phases,
    context_length,
    design,
    make_model,
    place_weights,
    size_kv,
    weight_bytes,
)
from octavo.core.entry.host_memory import HostMemory, make_host_memory
from octavo.core.entry.op_choice import capabilities_of, choose_ops
from octavo.core.entry.vocabulary import grammars_of, texts_of, vocabulary_of
from octavo.core.lanes import LaneSet
from octavo.core.loading.files import ModelFiles
from octavo.core.loading.packing import load_weights
from octavo.core.loading.progress import Progress, SilentProgress
from octavo.core.numa import Binding, bind, binding, node_free
from octavo.core.scheduler import Scheduler
from octavo.plugins.manager import Resolved, plugins

_engines_of: int | None = None
"""The process that built the first engine: what a fork copies into a child."""


def _refuse_forked() -> None:
    """A fork takes no threads along, and the pool that computes would wait for them for ever."""
    global _engines_of
    _engines_of = _engines_of or os.getpid()
    if _engines_of != os.getpid():
        raise ConfigError(
            f"this process was forked from one that ran an engine (process {_engines_of}), whose "
            "threads it does not have: start it with multiprocessing's 'spawn' instead"
        )


def resolve_device(word: str) -> Resolved:
    """The backend behind a `--device` word. Raises ConfigError."""
    return plugins().resolve(word)


def resolve_model(
    config: EngineConfig, progress: Progress | None = None, *, weights: bool = True
) -> ModelFiles:
    """MODEL as local files, through a plug-in's source if one knows it, else folder, file, hub or package.

    weights: False leaves a hub's weights where they are."""
    from octavo.core.loading.sources import resolve

    cache_dir = config.cache_path()
    found = plugins().model_source(config.model, config.revision, cache_dir)
    if found is not None:
        return found
    return resolve(
        config.model,
        revision=config.revision,
        cache_dir=cache_dir,
        progress=progress,
        weights=weights,
    )


def build_engine(
    config: EngineConfig,
    *,
    files: ModelFiles | None = None,
    progress: Progress | None = None,
    resolved: Resolved | None = None,
) -> Engine:
    """Loads a model on a device and returns the engine that runs it.

    resolved: the backend, where it is known already and need not be looked for by `config.device`.

    Raises:
        ConfigError, ModelError: what was asked, what is possible, and what to change.
    """
    _refuse_forked()
    progress = progress or SilentProgress()
    phases = Phases()
    with phases("find device"):
        resolved = resolved or resolve_device(config.device)
    backend, device = resolved.backend, resolved.device
    where = _bind(config, phases)
    with phases("find model"):
        files = files or resolve_model(config, progress)
    with phases("import torch"):
        import torch  # noqa: F401  # timed apart: it is most of a warm start
    with phases("read config"):
        made = design(config, files, resolved, phases)
        shape, plan, limits = made.shape, made.plan, made.limits
        backend.start(device, limits)
        replaced = choose_ops(config, resolved, phases.notes)
        ops = replaced.ops
        model = make_model(made, files, ops)
        placed = place_weights(made, model, phases)
    with phases("load weights"):
        loaded = load_weights(
            *(model, placed, files, ops, made.dtype, progress, config.packed_cache),
            local=where is not None and where.node is not None,
        )
        phases.notes.extend(loaded.notes)
        weights = loaded.weights
        for name, table in model.tables(limits.max_model_len).items():
            weights[name] = table.to(ops.device)
    with phases("allocate KV cache"):
        # What the loaded weights have left: a mapped file's pages count as free, but are in use.
        free = max(0, _free(backend, device, where) - loaded.mapped_bytes)
        num_blocks, block_bytes = size_kv(config, made, ops, free)
        max_len = context_length(config, limits, plan, num_blocks, phases)
        alloc_kv = partial(ops.alloc_kv, shape.kv, num_blocks, plan.block_size)
        kv = alloc_kv()

    from octavo.core.entry import drafting  # which needs this module

    left = max(0, free - num_blocks * block_bytes)
    host, kv = make_host_memory(config, made, ops, kv, num_blocks, left)
    left -= host.taken if host is not None else 0
    target = drafting.Target(made, files, ops, weights, num_blocks, max_len, left)
    speculation = drafting.make_speculation(config, target, phases, progress)
    scheduler = make_scheduler(config, made, ops, num_blocks, max_len, phases, speculation, host)
    grammars = grammars_of(files, shape.vocab_size, made.eos_token_ids)
    from octavo.core.runner import Runner

    with phases("warm up"):
        runner = Runner(
            backend,
            device,
            ops,
            plan,
            model,
            weights,
            kv,
            alloc_kv,
            vocabulary_of(files, shape.vocab_size),
            len(shape.kv) or 1,
            grammars,
            host.store if host is not None else None,
            "embed" in made.tasks.names,
        )
        if made.model_class.generates and backend.capabilities(device).shapes != "dynamic":
            count = runner.warm_up(progress)
            phases.notes.append(f"{count} shapes of steps were run once")
    drafting.time_target(speculation, runner, target, phases)
    info = ModelInfo(
        name=files.name,
        architecture=made.model_class.__name__,
        max_model_len=max_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=made.eos_token_ids,
        device=device,
        device_reason=resolved.reason,
        backend=backend.name,
        dtype=made.dtype,
        quantization=made.scheme.name if made.scheme else None,
        kv_dtype=plan.kv_dtype,
        block_size=plan.block_size,
        num_kv_blocks=num_blocks,
        kv_bytes=num_blocks * block_bytes,
        host_blocks=host.num_slots if host is not None else 0,
        host_bytes=host.num_slots * host.row_bytes if host is not None else 0,
        preemption_mode=config.preemption_mode if host is not None else "recompute",
        weight_bytes=weight_bytes(placed, ops, made.dtype),
        max_num_seqs=scheduler.limits.max_num_seqs,
        max_num_batched_tokens=scheduler.limits.max_num_batched_tokens,
        max_logprobs=config.max_logprobs,
        phases=phases.seconds,
        notes=tuple(phases.notes),
        capabilities=capabilities_of(backend, device, replaced),
        **tasking.task_facts(config, made, max_len),
    )
    return Engine(scheduler, runner, info, grammars, texts_of(files))


def make_scheduler(
    config: EngineConfig,
    made: Design,
    ops: Ops,
    num_blocks: int,
    max_len: int,
    phases: Phases,
    speculation: Speculation | None,
    host: HostMemory | None = None,
) -> Scheduler:
    """The scheduler that drives the plan's lanes, over an empty KV cache."""
    plan = made.plan
    lanes = LaneSet(plan.lanes, plan.max_logits_rows)
    caching = config.enable_prefix_caching
    if caching and lanes.longest_whole is not None:
        caching = False
        who = "an encoder" if made.model_class.bidirectional else "this device"
        phases.notes.append(
            f"no prefix caching: {who} computes prompts whole, of at most {lanes.longest_whole} tokens"
        )
    limits = SchedulerLimits(
        max_num_seqs=min(config.max_num_seqs, lanes.max_num_seqs),
        max_num_batched_tokens=lanes.max_tokens,
        max_model_len=max_len,
        max_logits_rows=plan.max_logits_rows,
        fcfs_only=config.scheduling_policy == "fcfs",
        lanes=plan.lanes,
    )
    rest = made.resolved.backend.pins_frees
    blocks = BlockManager(num_blocks, plan.block_size, caching, rest, ops.drain)
    swap = None
    if host is not None:
        swap = host.swap(blocks, config.preemption_mode)
        phases.notes.append(host.note)
    return Scheduler(blocks, limits, config.seed, speculation, swap)


def _bind(config: EngineConfig, phases: Phases) -> Binding | None:
    """Takes this thread to the processors that were asked for, before it starts any other."""
    if config.cpu_affinity is None and config.numa_node is None:
        return None
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--cpu-affinity and --numa-node: not on this system; leave them out")
    allowed = frozenset(os.sched_getaffinity(0))
    where = binding(config.cpu_affinity, config.numa_node, allowed)
    if where is not None:
        bind(where)
        phases.notes.extend([where.note] if where.note else [])
    return where


def _free(backend: Backend, device: str, where: Binding | None) -> int:
    """Bytes of memory free, on the node that this engine is bound to if it is to one."""
    free = backend.memory(device).free
    on_node = node_free(where.node) if where is not None and where.node is not None else None
    return free if on_node is None else min(free, on_node)
