"""Which numbers an engine computes with: the weights' dtype and scheme, and the KV cache's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.contract import Capabilities
from octavo.core.loading.hf_config import quantization_config
from octavo.core.quantization import choose_scheme

if TYPE_CHECKING:
    from octavo.core.quantization.base import Scheme


@dataclass(frozen=True)
class Numbers:
    """dtype: of float weights. notes: what was chosen without being asked for, and why."""

    dtype: str
    kv_dtype: str
    scheme: Scheme | None
    notes: tuple[str, ...]


def choose_numbers(
    config: EngineConfig,
    model_config: Mapping[str, Any],
    capabilities: Capabilities,
    device: str,
    schemes: Mapping[str, str],
) -> Numbers:
    """What was asked for, and what suits the checkpoint and the device where nothing was.

    schemes: the known ones, name -> "module:class".

    Raises:
        ConfigError, ModelConfigError: what the device does not offer, or the checkpoint cannot give.
    """
    notes: list[str] = []
    scheme = _scheme(config, model_config, capabilities, device, schemes, notes)
    dtype = _dtype(config, model_config, capabilities, device, notes)
    kv_dtype = _kv_dtype(config, dtype, scheme, capabilities, device, notes)
    return Numbers(dtype, kv_dtype, scheme, tuple(notes))


def _scheme(
    config: EngineConfig,
    model_config: Mapping[str, Any],
    capabilities: Capabilities,
    device: str,
    schemes: Mapping[str, str],
    notes: list[str],
) -> Scheme | None:
    checkpoint = quantization_config(model_config)
    scheme = choose_scheme(config.quantization, checkpoint, schemes)
    offered = capabilities.quantization
    if scheme is None or scheme.form in offered:
        return scheme
    if checkpoint is None:
        has = f"it has {', '.join(offered)}" if offered else "it quantises nothing: leave it out"
        raise ConfigError(
            f"--quantization {scheme.name} needs {scheme.form} weights, which {device} does not "
            f"offer; {has}"
        )
    notes.append(
        f"quantization {scheme.name}: {device} has no {scheme.form} weights, so they are unpacked"
    )
    return scheme


def _dtype(
    config: EngineConfig,
    model_config: Mapping[str, Any],
    capabilities: Capabilities,
    device: str,
    notes: list[str],
) -> str:
    dtype = config.dtype
    if dtype == "auto":
        stored = str(model_config.get("dtype") or model_config.get("torch_dtype") or "float32")
        stored = stored.removeprefix("torch.")
        known = capabilities.dtypes
        other = "float32" if "float32" in known or not known else known[0]
        dtype = stored if stored in capabilities.native_dtypes else other
        if dtype != stored:
            notes.append(f"dtype {dtype}: the checkpoint's {stored} is not native to {device}")
    if dtype not in capabilities.dtypes:
        raise ConfigError(
            f"--dtype {dtype} is not offered by {device}; it has {', '.join(capabilities.dtypes)}"
        )
    return dtype


def _kv_dtype(
    config: EngineConfig,
    dtype: str,
    scheme: Scheme | None,
    capabilities: Capabilities,
    device: str,
    notes: list[str],
) -> str:
    """The dtype of the KV cache: what was asked for, else as small as the weights justify."""
    kv_dtype = config.kv_cache_dtype
    if kv_dtype == "auto":
        small = scheme is not None or dtype != "float32"
        if capabilities.kv_follows_dtype or capabilities.kv_equals_dtype:
            small = False
        kv_dtype = "float16" if small and "float16" in capabilities.kv_dtypes else dtype
        if kv_dtype != dtype:
            weights = scheme.name if scheme is not None else dtype
            notes.append(f"KV cache in {kv_dtype}: chosen beside {weights} weights")
    if kv_dtype not in capabilities.kv_dtypes:
        raise ConfigError(
            f"--kv-cache-dtype {kv_dtype} is not offered by {device}; "
            f"it has {', '.join(capabilities.kv_dtypes)}"
        )
    if capabilities.kv_equals_dtype and kv_dtype != dtype:
        raise ConfigError(
            f"--kv-cache-dtype {kv_dtype} beside {dtype} weights: attention on {device} takes queries "
            "and cache of one dtype; leave it out, or ask for both in one"
        )
    return kv_dtype
