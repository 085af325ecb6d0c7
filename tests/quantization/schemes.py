"""A third party's schemes: one that quantises plain weights, one that reads its own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from octavo.core.config import ConfigError
from octavo.plugins import QuantizedTensor, Scheme, WeightSpec


class Ternary(Scheme):
    """Weights of -1, 0 and 1 with a scale for each output, kept as int8."""

    name: ClassVar[str] = "ternary"
    form: ClassVar[str] = "int8"

    @classmethod
    def from_weights(cls) -> Scheme:
        return cls()

    def choices(self, spec: WeightSpec) -> tuple[tuple[str, int], ...]:
        return (("int8", 0),) if spec.role == "linear" else ()

    def read(self, spec: WeightSpec, name: str, shape: Any, source: Any) -> Any:
        weight = source.get(name)
        if spec.scheme is None:
            return weight
        scales = weight.abs().mean(-1, keepdim=True).float()
        codes = torch.round(weight / scales).clamp(-1, 1).to(torch.int8)
        return QuantizedTensor("int8", codes, scales, None, shape[1], torch.float32)


class Words(Scheme):
    """Checkpoints whose linear weights are 4-bit codes, eight to an int32 word, with zero points."""

    name: ClassVar[str] = "words"
    form: ClassVar[str] = "int4"

    def __init__(self, group: int, skipped: tuple[str, ...]) -> None:
        self.group, self.skipped = group, skipped

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> Scheme:
        if config.get("bits") != 4:
            raise ConfigError(f"words checkpoints have 4 bits, this one {config.get('bits')}")
        return cls(int(config["group_size"]), tuple(config.get("skipped", ())))

    def choices(self, spec: WeightSpec) -> tuple[tuple[str, int], ...]:
        skipped = any(word in name for name, _ in spec.parts for word in self.skipped)
        return () if spec.role != "linear" or skipped else (("int4", self.group),)

    def _plain(self, spec: WeightSpec) -> bool:
        return not self.choices(spec)

    def tensors(self, spec: WeightSpec, name: str, shape: Any) -> Mapping[str, Any]:
        if self._plain(spec):
            return {name: shape}
        stem, (n, k) = name.removesuffix(".weight"), shape
        return {
            f"{stem}.qweight": (n, k // 8),
            f"{stem}.scales": (n, k // self.group),
            f"{stem}.qzeros": (n, k // self.group),
        }

    def read(self, spec: WeightSpec, name: str, shape: Any, source: Any) -> Any:
        if self._plain(spec):
            return source.get(name)
        stem = name.removesuffix(".weight")
        words, scales, zeros = (source.get(f"{stem}.{p}") for p in ("qweight", "scales", "qzeros"))
        codes = (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
        codes = codes.flatten(1).to(torch.uint8)
        minima = (-zeros * scales.float()).half()
        return QuantizedTensor("int4", codes, scales, minima, self.group, torch.float32)
