"""A model's weights in the layout its backend wants: packed from the checkpoint, or mapped from a file
in which an earlier start has kept them packed."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import octavo
from octavo.core.contract import Ops, PackedWeight, WeightSpec
from octavo.core.loading.files import ModelFiles, file_identity
from octavo.core.loading.packed_file import (
    SUFFIX,
    PackedFile,
    UnusableError,
    let_go,
    remove_orphans,
)
from octavo.core.loading.progress import Progress
from octavo.core.memory import host_memory, trim_heap
from octavo.core.quantization import Placement

if TYPE_CHECKING:
    from octavo.core.loading.packed_file import Bytes
    from octavo.core.loading.weights import WeightSource
    from octavo.core.models.base import Model

log = logging.getLogger("octavo")

FOLDER = "packed"
"""Where packed weights lie in a model's folder of derived files."""

WORTH_SECONDS = 0.1
"""Packing that takes less is done again at every start: no file is worth that little."""

_VERSION = 1  # counts changes of what is read from checkpoints, and of names among the weights


@dataclass(frozen=True)
class Loaded:
    """A model's weights by name, ready for its ops.

    mapped_bytes: of a mapped file; the system counts such pages as memory that is free.
    """

    weights: dict[str, PackedWeight]
    mapped_bytes: int = 0
    notes: tuple[str, ...] = ()


def load_weights(
    model: Model,
    placed: Placement,
    files: ModelFiles,
    ops: Ops,
    dtype: str,
    progress: Progress,
    keep: bool | None = None,
    *,
    local: bool = False,
) -> Loaded:
    """Maps or packs all weights of a model.

    placed: its weights, each with the form it is to take.
    keep: whether packed weights are kept for the next start; None: when that is worth it.
    local: in memory of this process alone, on the memory node where it runs: a mapped file's pages
    stay on that of whoever read them first.

    Raises:
        ModelError: the checkpoint cannot be read, or its tensors are not the model's.
    """
    specs = placed.specs
    kept = None if keep is False else packed_file(files, ops, placed, dtype)
    notes = []
    if kept is not None:
        try:
            data = kept.read()
            if data is not None:
                return _mapped(data, specs, ops, dtype, local)
        except UnusableError as error:
            notes.append(f"packed weights in {kept.path} are not used: {error}")
    started = time.perf_counter()
    weights = _packed(model, placed, files, ops, dtype, progress)
    if kept is not None:
        seconds = time.perf_counter() - started
        notes += _keep(kept, _own(specs), weights, ops, seconds, force=bool(keep))
    return Loaded(weights, notes=tuple(notes))


def packed_file(files: ModelFiles, ops: Ops, placed: Placement, dtype: str) -> PackedFile | None:
    """Where these weights, packed so, would be kept; None where they cannot be."""
    layout = ops.packed_key()
    if layout is None or files.derived_dir is None:
        return None
    # Two schemes may make different numbers of one form, so the scheme counts beside the specs.
    scheme = placed.scheme.name if placed.scheme is not None else None
    described = hashlib.sha256(repr([scheme, *placed.specs]).encode()).hexdigest()
    key = {
        "checkpoint": _identity(files),
        "weights": described,
        "dtype": dtype,
        "layout": layout,
        "version": f"{octavo.__version__}/{_VERSION}",
    }
    key = json.loads(json.dumps(key))  # as it will be read back
    schemes = sorted({spec.scheme for spec in placed.specs if spec.scheme})
    # One file for each way to pack: what else the key says makes a file stale, to be written over.
    way = hashlib.sha256(json.dumps([layout, described]).encode()).hexdigest()[:8]
    name = "-".join([dtype, *schemes, way]) + SUFFIX
    return PackedFile(files.derived_dir / FOLDER / name, key, str(files.path))


def _identity(files: ModelFiles) -> list[Any]:
    if files.kind == "gguf":
        return [files.path.name, file_identity(files.path)]
    paths = sorted(files.path.glob("*.safetensors*"))
    return [[path.name, file_identity(path)] for path in paths]


def _own(specs: Sequence[WeightSpec]) -> list[WeightSpec]:
    """Those that are not made from another one."""
    names = {spec.name for spec in specs}
    return [spec for spec in specs if spec.alias not in names]


def _mapped(
    data: Mapping[str, Bytes], specs: Sequence[WeightSpec], ops: Ops, dtype: str, local: bool
) -> Loaded:
    import torch

    weights: dict[str, PackedWeight] = {}
    own = local or not ops.keeps_packed
    try:
        for spec in _own(specs):
            mapped = torch.from_numpy(data[spec.name])
            given = mapped.clone() if local and ops.keeps_packed else mapped
            weights[spec.name] = ops.load_packed(given, spec, dtype)
            if own:
                let_go(data[spec.name])
    except (KeyError, ValueError, RuntimeError) as error:
        raise UnusableError(f"{spec.name} is not what it should be ({error})") from error
    _tie(weights, specs, ops)
    return Loaded(weights, 0 if own else sum(array.nbytes for array in data.values()))


def _packed(
    model: Model,
    placed: Placement,
    files: ModelFiles,
    ops: Ops,
    dtype: str,
    progress: Progress,
) -> dict[str, PackedWeight]:
    from octavo.core.loading.weights import open_weights

    source = open_weights(files)
    try:
        check_weights(model, placed, source)
        own = _own(placed.specs)
        work = f"loading weights as {placed.scheme.name}" if placed.scheme else "loading weights"
        task = progress.task(work, len(own))
        weights: dict[str, PackedWeight] = {}
        for spec in own:
            parts = placed.read(spec, source)
            weights[spec.name] = ops.pack_weight(parts, spec, dtype)
            del parts
            for name in placed.names(spec):  # else the checkpoint would stay beside its packed form
                source.release(name)
            task.advance(1)
        task.close()
    finally:
        source.close()
    trim_heap()  # what unpacking has held for a while: some tens of megabytes
    _tie(weights, placed.specs, ops)
    return weights


def _tie(weights: dict[str, PackedWeight], specs: Sequence[WeightSpec], ops: Ops) -> None:
    """One tensor for both, unless the backend lays them apart."""
    for spec in specs:
        if spec.name not in weights:
            assert spec.alias is not None
            weights[spec.name] = ops.tied_weight(weights[spec.alias], spec)


def check_weights(model: Model, placed: Placement, source: WeightSource) -> None:
    """Refuses a checkpoint whose tensors are not the model's, by names and shapes alone.

    Raises:
        WeightsError: what is missing, unexpected or misshapen.
    """
    from octavo.core.loading.weights import check_names

    expected = placed.expected()
    check_names(expected, source.names(), ignore=_ignorable(model, source, expected))


def _ignorable(model: Model, source: WeightSource, expected: Mapping[str, Any]) -> list[str]:
    """Tensors that may stand in a checkpoint unused: old buffers, and a head that is tied."""
    unused = [n for n in source.names() if n.endswith(model.ignored_tensors)]
    return unused + ["lm_head.weight"] * ("lm_head.weight" not in expected)


# -------------------------------------------------------------------------- for the next start


def _keep(
    kept: PackedFile,
    specs: Sequence[WeightSpec],
    weights: Mapping[str, PackedWeight],
    ops: Ops,
    seconds: float,
    *,
    force: bool,
) -> list[str]:
    """Writes packed weights beside the engine's first requests; returns notes for the user."""
    if not force and seconds < WORTH_SECONDS:
        return []
    data = {spec.name: ops.store_packed(weights[spec.name], spec).numpy() for spec in specs}
    size = sum(array.nbytes for array in data.values())
    shown = f"{size >> 20} MiB"
    if not force and (reason := _not_worth_it(kept, size)):
        return [f"packed weights ({shown}) are not kept for the next start: {reason}"]

    def write() -> None:
        try:
            kept.write(data)
            # Those of other local models, if this is one: their folders are this one's neighbours.
            remove_orphans(kept.path.parents[2].glob(f"*/{FOLDER}/*{SUFFIX}"))
        except OSError as error:
            log.warning("packed weights (%s) are not kept for the next start: %s", shown, error)

    # No daemon: a process that ends at once still leaves the file behind.
    threading.Thread(target=write, name="octavo-packed-weights").start()
    return [f"packed weights ({shown}) are kept for the next start in {kept.path}"]


def _not_worth_it(kept: PackedFile, size: int) -> str | None:
    """Why a file of `size` bytes should not be written, or None."""
    folder = next(parent for parent in kept.path.parents if parent.exists())
    try:
        disk = shutil.disk_usage(folder)
    except OSError as error:
        return str(error)
    if disk.free - size < disk.total // 20:
        return (
            f"the disk of {folder} has {disk.free >> 20} MiB free, and a twentieth of it stays so"
        )
    # A file that memory cannot hold comes from the disk every time, and packed is seldom smaller.
    free = host_memory().free
    if size > free:
        return f"the system's file cache could not hold them beside the engine ({free >> 20} MiB)"
    return None
