"""Tensor parallelism by annotation: weights and cache say how they are cut, XLA's partitioner does the rest.

One program runs on all chips (`layout="spmd"`), and the collectives in it are the partitioner's. Each axis is cut
in even parts or not at all: what does not divide is copied to every chip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.backends.xla import bridge
from octavo.backends.xla.cache import KV
from octavo.plugins import PackedWeight, QuantizedTensor, WeightSpec


def axis_of(spec: WeightSpec, chips: int) -> int | None:
    """The axis of a weight that is cut over so many chips; None: every chip has all of it."""
    axis = spec.shard_axis
    if axis is None or spec.shape[axis] % chips:
        return None
    return axis


def shard_weights(
    weights: Mapping[str, PackedWeight], specs: Sequence[WeightSpec], chips: int, mesh: Any
) -> None:
    """Cuts each weight of `specs` over the mesh. Codes that are grouped along an axis are copied instead."""
    for spec in specs:
        weight = weights[spec.name]
        if not isinstance(weight, QuantizedTensor):
            bridge.cut(weight, mesh, axis_of(spec, chips))


def shard_cache(cache: Sequence[KV], chips: int, mesh: Any) -> None:
    """Cuts each layer's cache by heads."""
    for layer in cache:
        bridge.cut(layer.data, mesh, None if layer.kv_heads % chips else 1)
