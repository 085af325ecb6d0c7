"""Smaller weights: the registries of forms and schemes, and a model's weights placed by a scheme.

Importing it imports no torch: forms and schemes are named here and loaded when first asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError, nearest
from octavo.core.contract import WeightSpec
from octavo.core.loading.errors import ModelConfigError
from octavo.core.quantization.base import Form, QuantizedTensor, Scheme, Shape, Tensors

if TYPE_CHECKING:
    import torch

FORMS: dict[str, str] = {
    "int8": "octavo.core.quantization.int8:Int8Form",
    "int4": "octavo.core.quantization.int4:Int4Form",
}
"""Canonical form -> "module:class"."""

KEPT: dict[str, str] = {
    "codes8": "octavo.core.quantization.kept:Codes8",
    "codes4": "octavo.core.quantization.kept:Codes4",
}
"""The same of forms that nothing is quantised to: a checkpoint has its weights in them."""

SCHEMES: dict[str, str] = {
    "int8": "octavo.core.quantization.int8:Int8",
    "int4": "octavo.core.quantization.int4:Int4",
}
"""Scheme -> "module:class". Plug-ins add to a copy of it."""

_MAX_LISTED = 3


def _load(where: str) -> Any:
    module, _, attribute = where.partition(":")
    return getattr(import_module(module), attribute)


@cache
def form(name: str) -> Form:
    """A canonical form by its name."""
    made: Form = _load((FORMS | KEPT)[name])()
    return made


def scheme_class(name: str, known: Mapping[str, str] = SCHEMES) -> type[Scheme]:
    """A scheme by its name.

    Raises:
        ConfigError: there is none of this name, with those there are.
    """
    if name not in known:
        raise ConfigError(
            f"--quantization {name!r} is not known{nearest(name, known)}; known: "
            f"{', '.join(sorted(known))}"
        )
    found: type[Scheme] = _load(known[name])
    return found


def choose_scheme(
    asked: str | None,
    checkpoint: Mapping[str, Any] | None,
    known: Mapping[str, str] = SCHEMES,
) -> Scheme | None:
    """The scheme for a model: the one its checkpoint is quantised with, or the one asked for.

    checkpoint: its `quantization_config`, or None when it holds plain numbers.

    Raises:
        ConfigError: a scheme that is not known, that cannot be made from plain numbers, or another
            than the checkpoint's.
        ModelConfigError: the checkpoint's own is not read here.
    """
    if checkpoint is not None:
        method = str(checkpoint.get("quant_method"))
        read = scheme_class(method, known).from_checkpoint(checkpoint) if method in known else None
        if read is None:
            raise ModelConfigError(
                f"the checkpoint is quantized ({method}), which is not read here: use the model's "
                "unquantized safetensors, or a GGUF file of it"
            )
        if asked not in (None, method):
            raise ConfigError(
                f"--quantization {asked} cannot be had from a checkpoint that is quantized with "
                f"{method}; leave it out"
            )
        return read
    if asked is None:
        return None
    made = scheme_class(asked, known).from_weights()
    if made is None:
        raise ConfigError(
            f"--quantization {asked} is for checkpoints that were made with it, and this one was not; "
            "leave it out, or use int8 or int4"
        )
    return made


@dataclass(frozen=True)
class Placement:
    """A model's weights with the form of each decided; `notes` says what had to be another form."""

    scheme: Scheme | None
    specs: tuple[WeightSpec, ...]
    notes: tuple[str, ...] = ()

    def expected(self) -> dict[str, Shape]:
        """The checkpoint's tensors that the model needs, with their shapes."""
        scheme = self.scheme
        if scheme is None:
            return {name: shape for spec in self.specs for name, shape in spec.parts}
        return {
            tensor: size
            for spec in self.specs
            for name, shape in spec.parts
            for tensor, size in scheme.tensors(spec, name, shape).items()
        }

    def names(self, spec: WeightSpec) -> list[str]:
        """The checkpoint's tensors behind a weight."""
        if self.scheme is None:
            return [name for name, _ in spec.parts]
        return [
            tensor
            for name, shape in spec.parts
            for tensor in self.scheme.tensors(spec, name, shape)
        ]

    def read(self, spec: WeightSpec, source: Tensors) -> dict[str, torch.Tensor | QuantizedTensor]:
        """A weight's parts, as `Ops.pack_weight` takes them: either codes of the form and group that
        the spec names, for all parts, or float numbers for all."""
        if self.scheme is None:
            return {name: source.get(name) for name, _ in spec.parts}
        found = {name: self.scheme.read(spec, name, shape, source) for name, shape in spec.parts}
        group = spec.group or spec.shape[-1]
        ready = all(
            isinstance(part, QuantizedTensor) and (part.form, part.group) == (spec.scheme, group)
            for part in found.values()
        )
        if ready:
            return found
        return {
            name: form(part.form).dequantize(part) if isinstance(part, QuantizedTensor) else part
            for name, part in found.items()
        }


def place(specs: Iterable[WeightSpec], scheme: Scheme | None, offered: Sequence[str]) -> Placement:
    """Decides the form of every weight: the best of the scheme's that the device offers and that
    holds its shape, else none. A tied weight has the form of the one it is tied to."""
    if scheme is None:
        return Placement(None, tuple(specs))
    placed: dict[str, WeightSpec] = {}
    missed: dict[tuple[str, str, str], list[str]] = {}
    for spec in specs:
        if spec.alias in placed:
            tied = placed[spec.alias]
            placed[spec.name] = replace(spec, scheme=tied.scheme, group=tied.group)
            continue
        choices = scheme.choices(spec)
        chosen = replace(spec, scheme=None, group=0)
        for name, group in choices:
            if name in offered and form(name).holds(spec.shape, group):
                chosen = replace(spec, scheme=name, group=group)
                break
        placed[spec.name] = chosen
        if choices and chosen.scheme != choices[0][0]:
            wanted = choices[0][0]
            why = form(wanted).needs if wanted in offered else "a device that offers it"
            missed.setdefault((chosen.scheme or "float", wanted, why), []).append(spec.name)
    return Placement(scheme, tuple(placed.values()), tuple(map(_note, missed.items())))


def _note(entry: tuple[tuple[str, str, str], list[str]]) -> str:
    (got, wanted, why), names = entry
    rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return (
        f"quantization: {len(names)} weights are {got}, because {wanted} needs {why}: "
        f"{', '.join(names[:_MAX_LISTED])}{rest}"
    )
