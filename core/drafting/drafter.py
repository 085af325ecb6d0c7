"""What proposes drafts, and how it is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from octavo.core.config import ConfigError, nearest
from octavo.core.drafting.times import StepTimes
from octavo.core.sequence import Sequence as Seq


class Drafter(Protocol):
    """Guesses tokens. What it keeps of a sequence it puts into `sequence.draft_state`, which goes with
    the sequence; a fork begins without one.

    It may have an attribute `alike`: True where how often it is right is a matter of the drafter more than
    of the text, so that a new sequence begins with what drafts were worth to others.
    """

    def propose(self, sequences: Sequence[Seq], counts: Sequence[int]) -> list[list[int]]:
        """At most `counts[i]` tokens that may follow `sequences[i].tokens[:num_tokens]`, for each i."""
        ...


class AlikeDrafter(Drafter, Protocol):
    """A drafter that is `alike`, and says what it takes: a model.

    Attributes:
        times: of its own steps, by number of sequences.
        once_seconds: of the last `propose`: what was computed that is not again, as a prompt.
    """

    times: StepTimes
    once_seconds: float

    def missing(self, sequence: Seq) -> int:
        """Tokens of the sequence that it has to compute before its first guess."""
        ...


class _Learned:
    """A drafter that says no more than that it is alike: what its guesses take is learned."""

    def __init__(self, drafter: Drafter) -> None:
        self.propose = drafter.propose
        self.times, self.once_seconds = StepTimes(), 0.0

    def missing(self, sequence: Seq) -> int:
        return 0


def as_alike(drafter: Drafter) -> AlikeDrafter | None:
    """The drafter, if it says of itself that it is alike to all."""
    if not getattr(drafter, "alike", False):
        return None
    return cast("AlikeDrafter", drafter) if hasattr(drafter, "times") else _Learned(drafter)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to draft. Names are vLLM's.

    method: `ngram`, `draft_model`, `self`, or a plug-in's. model: of `draft_model`, as MODEL; None: the target's
    own, in smaller weights. quantization: of `draft_model`: its weights' scheme. num_layers: of `self`: the
    model's first layers that draft; None: a third of them. num_speculative_tokens: the longest draft.
    prompt_lookup_min, prompt_lookup_max: tokens of the shortest and of the longest match that `ngram` goes by.
    adaptive: whether drafts are shortened or left out where they cost more than they bring.
    """

    method: str
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    adaptive: bool = True
    model: str | None = None
    quantization: str | None = None
    num_layers: int | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """From a mapping, as `speculative_config` brings it.

        Raises:
            ConfigError: an unknown key, or a value that cannot be used.
        """
        known = tuple(cls.__dataclass_fields__)
        for key in given:
            if key not in known:
                raise ConfigError(
                    f"speculative_config has an unknown key {key!r}{nearest(str(key), known)}; "
                    f"known: {', '.join(known)}"
                )
        method = given.get("method")
        if not isinstance(method, str) or not method:
            raise ConfigError(
                f'speculative_config needs a method, as {{"method": "ngram"}}; got {method!r}'
            )
        made = cls(**given)
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(made, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64:
                raise ConfigError(
                    f"speculative_config.{name} must be a whole number from 1 to 64, got {value!r}"
                )
        if made.prompt_lookup_min > made.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config.prompt_lookup_min ({made.prompt_lookup_min}) exceeds "
                f"prompt_lookup_max ({made.prompt_lookup_max})"
            )
        if not isinstance(made.adaptive, bool):
            raise ConfigError(
                f"speculative_config.adaptive must be true or false, got {made.adaptive!r}"
            )
        made._check_model()
        return made

    def _check_model(self) -> None:
        for name in ("model", "quantization"):
            value = getattr(self, name)
            if value is None:
                continue
            if self.method != "draft_model":
                raise ConfigError(
                    f"speculative_config.{name} is of the method draft_model, not of {self.method!r}: leave it out"
                )
            if not isinstance(value, str) or not value:
                raise ConfigError(f"speculative_config.{name} must be a name, got {value!r}")
        if self.method == "draft_model" and self.model is None and self.quantization is None:
            raise ConfigError(
                "speculative_config: draft_model needs the model that drafts, as "
                '{"method": "draft_model", "model": "FOLDER"}, or smaller weights of the same model, as '
                '{"method": "draft_model", "quantization": "int4"}'
            )
        layers = self.num_layers
        if layers is None:
            return
        if self.method != "self":
            raise ConfigError(
                f"speculative_config.num_layers is of the method self, not of {self.method!r}: leave it out"
            )
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
            raise ConfigError(
                f"speculative_config.num_layers must be a whole number of at least 1, got {layers!r}"
            )


def make_drafter(config: SpeculativeConfig, others: Mapping[str, str]) -> Drafter:
    """The drafter that `config` names. others: those of plug-ins, as "module:class" by name; such a class is
    called with the config.

    Raises:
        ConfigError: there is none of that name.
    """
    known = {**_OWN, **others}
    where = known.get(config.method)
    if where is None:
        raise ConfigError(
            f"speculative_config.method {config.method!r} is not known"
            f"{nearest(config.method, [*known, *BY_MODEL])}; there is {', '.join(sorted([*known, *BY_MODEL]))}"
        )
    from importlib import import_module

    module, _, name = where.partition(":")
    drafter: Drafter = getattr(import_module(module), name)(config)
    return drafter


_OWN = {"ngram": "octavo.core.drafting.ngram:NgramDrafter"}

BY_MODEL = ("draft_model", "self")
"""Methods whose drafter is a model, which only who loads models can make."""
