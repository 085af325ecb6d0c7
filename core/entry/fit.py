"""Does a model fit a device, and how much can run at once: said before anything is loaded.

Every number comes from the functions that the engine's own start uses (`core.entry.design`), fed with
the memory that is free now less what the weights will take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.entry import design
from octavo.core.entry.host_memory import host_bytes
from octavo.core.entry.op_choice import choose_ops
from octavo.core.entry.wiring import resolve_device, resolve_model
from octavo.core.lanes import LaneSet
from octavo.core.loading.files import ModelFiles
from octavo.core.loading.packing import check_weights
from octavo.core.loading.progress import Progress
from octavo.core.quantization import SCHEMES, Placement, place, scheme_class

if TYPE_CHECKING:
    from octavo.core.contract import Ops
    from octavo.core.models.base import Model


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a start would come to. Sizes in bytes, lengths in tokens.

    fits: False with the reason in `problem`; the cache's numbers are then 0. limit: what bounds the
    requests of `typical_len` that run at once. advice: what to change, most useful first.
    """

    fits: bool
    problem: str | None
    model: str
    architecture: str
    parameters: int
    dtype: str
    quantization: str | None
    device: str
    device_reason: str
    memory_total: int
    memory_free: int
    weight_bytes: int
    kv_dtype: str
    kv_bytes_per_token: int
    block_size: int
    block_bytes: int
    num_kv_blocks: int = 0
    cache_tokens: int = 0
    host_bytes: int = 0
    max_model_len: int = 0
    max_num_seqs: int
    max_num_batched_tokens: int
    concurrent_at_max_model_len: int = 0
    typical_len: int = 0
    concurrent_at_typical_len: int = 0
    limit: str | None = None
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def fit(
    config: EngineConfig,
    *,
    typical_len: int = 1024,
    memory: int | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Works out what `config` would come to; reads configuration and headers, no weights.

    typical_len: tokens of prompt and output of a usual request. memory: bytes free on the device,
    instead of measuring them.

    Raises:
        ConfigError, ModelError: the model or device cannot be used, whatever its memory.
    """
    resolved = resolve_device(config.device)
    files = resolve_model(config, progress, weights=False)
    phases = design.Phases()
    made = design.design(config, files, resolved, phases)
    ops = choose_ops(config, resolved, phases.notes).ops
    model = design.make_model(made, files, ops)
    placed = design.place_weights(made, model, phases)
    _check_header(model, placed, files, phases)
    measured = resolved.backend.memory(resolved.device)
    total, free = (memory, memory) if memory is not None else (measured.total, measured.free)
    weights = design.weight_bytes(placed, ops, made.dtype)
    lanes = LaneSet(made.plan.lanes, made.plan.max_logits_rows)
    block = design.kv_block_bytes(made, ops)
    base = Fit(
        fits=True,
        problem=None,
        model=files.name,
        architecture=made.model_class.__name__,
        parameters=made.shape.num_parameters,
        dtype=made.dtype,
        quantization=made.scheme.name if made.scheme else None,
        device=resolved.device,
        device_reason=resolved.reason,
        memory_total=total,
        memory_free=free,
        weight_bytes=weights,
        kv_dtype=made.plan.kv_dtype,
        kv_bytes_per_token=block // made.plan.block_size,
        block_size=made.plan.block_size,
        block_bytes=block,
        max_num_seqs=min(config.max_num_seqs, lanes.max_num_seqs),
        max_num_batched_tokens=lanes.max_tokens,
    )
    if weights >= free:
        problem = f"the weights take {weights:,} bytes, {free:,} are free on {resolved.device}"
        advice = (*_smaller_weights(made, model, ops, weights, free), "use a smaller model")
        return replace(base, fits=False, problem=problem, advice=advice, notes=tuple(phases.notes))
    try:
        return _with_cache(base, config, made, ops, phases, typical_len)
    except ConfigError as error:
        return replace(base, fits=False, problem=str(error), notes=tuple(phases.notes))


def _check_header(
    model: Model, placed: Placement, files: ModelFiles, phases: design.Phases
) -> None:
    if files.kind == "folder" and not any(files.path.glob("*.safetensors")):
        phases.notes.append("the weights are not here yet: their names and shapes are unchecked")
        return
    from octavo.core.loading.weights import open_weights

    source = open_weights(files)
    try:
        check_weights(model, placed, source)
    finally:
        source.close()


def _with_cache(
    base: Fit,
    config: EngineConfig,
    made: design.Design,
    ops: Ops,
    phases: design.Phases,
    typical_len: int,
) -> Fit:
    left = base.memory_free - base.weight_bytes
    blocks, _ = design.size_kv(config, made, ops, left)
    longest = design.context_length(config, made.limits, made.plan, blocks, phases)
    if blocks * base.block_bytes > left:  # a number of blocks that was asked for
        raise ConfigError(
            f"{blocks} KV blocks take {blocks * base.block_bytes:,} bytes, {left:,} are free beside "
            "the weights: lower --num-kv-blocks"
        )
    size, usable = base.block_size, blocks - 1  # block 0 is the null block
    typical = min(typical_len, longest)

    def at_once(length: int) -> int:
        return min(base.max_num_seqs, usable // -(-length // size))

    result = replace(
        base,
        num_kv_blocks=blocks,
        cache_tokens=usable * size,
        max_model_len=longest,
        concurrent_at_max_model_len=at_once(longest),
        typical_len=typical,
        concurrent_at_typical_len=at_once(typical),
        notes=tuple(phases.notes),
    )
    limit, advice = _limit(result, config, made, usable // -(-typical // size), left)
    left -= blocks * base.block_bytes
    host, _ = host_bytes(config, made, left)
    return replace(result, limit=limit, advice=advice, host_bytes=host)


def _limit(
    result: Fit, config: EngineConfig, made: design.Design, by_blocks: int, left: int
) -> tuple[str, tuple[str, ...]]:
    """What bounds the requests that run at once, and what would raise it."""
    if by_blocks > result.max_num_seqs:
        return (
            f"max_num_seqs: the KV cache would hold {by_blocks} requests of "
            f"{result.typical_len} tokens",
            (f"--max-num-seqs {by_blocks} lets that many run at once",),
        )
    half = int(left * design.DEFAULT_KV_FRACTION)
    if by_blocks == result.max_num_seqs:
        return "max_num_seqs, and the KV cache holds no more", ()
    if config.num_kv_blocks is not None:
        limit, more = "num_kv_blocks", "--num-kv-blocks"
    elif config.kv_memory is not None:
        limit, more = "kv_memory", "--kv-memory"
    elif config.kv_fraction is not None:
        limit, more = f"kv_fraction {config.kv_fraction:g} of what is free", "--kv-fraction"
    elif half > design.DEFAULT_KV_BYTES:
        limit, more = "the KV cache's default of at most 4 GiB", "--kv-memory"
    else:
        limit, more = "the KV cache's default of half of what is free", "--kv-fraction"
    advice = []
    most = left // result.block_bytes - 1
    need = result.max_num_seqs * -(-result.typical_len // result.block_size)
    if most > result.num_kv_blocks:
        enough = min(need, most)
        kv = (enough + 1) * result.block_bytes
        runs = min(result.max_num_seqs, enough // -(-result.typical_len // result.block_size))
        value = {
            "--num-kv-blocks": str(enough + 1),
            "--kv-memory": f"{-(-kv // (1 << 20))}M",
        }.get(more, f"{min(1.0, kv / left + 0.005):.2f}")
        advice.append(f"{more} {value} lets {runs} run at once")
    capabilities = made.resolved.backend.capabilities(made.resolved.device)
    if result.kv_dtype == "float32" and "bfloat16" in capabilities.kv_dtypes:
        advice.append("--kv-cache-dtype bfloat16 halves what a token takes")
    return limit, tuple(advice)


def _smaller_weights(
    made: design.Design, model: Model, ops: Ops, weights: int, free: int
) -> tuple[str, ...]:
    """Dtypes and schemes that the device offers and that make the weights smaller, up to the first
    with which they fit."""
    capabilities = made.resolved.backend.capabilities(made.resolved.device)
    specs = list(model.specs())
    tried = []
    if made.scheme is None:
        if made.dtype == "float32" and "bfloat16" in capabilities.dtypes:
            placed = place(specs, None, capabilities.quantization)
            tried.append(("--dtype bfloat16", placed, "bfloat16"))
        for name in SCHEMES:
            if name in capabilities.quantization:
                scheme = scheme_class(name).from_weights()
                placed = place(specs, scheme, capabilities.quantization)
                tried.append((f"--quantization {name}", placed, made.dtype))
    advice = []
    for option, placed, dtype in tried:
        size = design.weight_bytes(placed, ops, dtype)
        if size >= weights:
            continue
        enough = "" if size < free else ", which is still too much"
        advice.append(f"{option} makes the weights {size:,} bytes{enough}")
        if size < free:
            break
    return tuple(advice)
