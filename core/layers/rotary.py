"""Rotary position embeddings (Su et al. 2021) as tables of cosines and sines, with the scalings of
published checkpoints: linear, Llama 3's by wavelength, and YaRN (Peng et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError

if TYPE_CHECKING:
    import torch

_ORIGINAL = "original_max_position_embeddings"
# What each kind computes with: numbers above zero.
_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
KINDS = tuple(_NEEDS)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's rotary settings in one form: rope_theta, rope_type, and the scaling's own keys.

    Checkpoints write them as `rope_parameters`, or as `rope_theta` beside `rope_scaling`.

    Raises:
        ConfigError: a kind that is not implemented, or a setting that it lacks or cannot compute with.
    """
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found.setdefault("rope_type", found.pop("type", "default"))
    found.setdefault(_ORIGINAL, config.get(_ORIGINAL) or config.get("max_position_embeddings"))
    if found["rope_type"] not in KINDS:
        raise ConfigError(
            f"rope_type {found['rope_type']!r} is not implemented; this build has {', '.join(KINDS)}"
        )
    for key in ("rope_theta", *_NEEDS[found["rope_type"]]):
        value = found.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < float(value or 0) < math.inf:
            raise ConfigError(
                f"rope_type {found['rope_type']!r} needs {key}, a number above 0, got {value!r}"
            )
    part = found.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if float(part) != 1.0:
        raise ConfigError(f"partial_rotary_factor {part} is not implemented for this architecture")
    return found


def rotary_table(parameters: Mapping[str, Any], rotary_dim: int, positions: int) -> torch.Tensor:
    """[positions, rotary_dim] float32: rotary_dim/2 cosines, then as many sines, of each position."""
    import torch

    base = float(parameters["rope_theta"])
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float()
    inverse = 1.0 / (base ** (steps / rotary_dim))
    kind, gain = parameters["rope_type"], 1.0
    if kind == "linear":
        inverse = inverse / float(parameters["factor"])
    elif kind == "llama3":
        inverse = _llama3(inverse, parameters)
    elif kind == "yarn":
        inverse, gain = _yarn(inverse, parameters, rotary_dim, base)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    return torch.cat((angles.cos() * gain, angles.sin() * gain), dim=-1)


def _llama3(inverse: torch.Tensor, p: Mapping[str, Any]) -> torch.Tensor:
    import torch

    factor, low, high = (
        float(p["factor"]),
        float(p["low_freq_factor"]),
        float(p["high_freq_factor"]),
    )
    original = float(p["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, blended, scaled)


def _yarn(
    inverse: torch.Tensor, p: Mapping[str, Any], dim: int, base: float
) -> tuple[torch.Tensor, float]:
    import torch

    factor = float(p["factor"])
    original = float(p["original_max_position_embeddings"])

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = (
        correction(float(p.get("beta_fast") or 32)),
        correction(float(p.get("beta_slow") or 1)),
    )
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    extrapolated = 1 - ramp.clamp(0, 1)
    scaled = inverse / factor * (1 - extrapolated) + inverse * extrapolated

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    gain = p.get("attention_factor")
    if gain is None:
        one, all_dims = p.get("mscale"), p.get("mscale_all_dim")
        gain = mscale(float(one)) / mscale(float(all_dims)) if one and all_dims else mscale(1.0)
    return scaled, float(gain)
