"""What stands in front of an engine: the model's files found, its tokenizer, its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.core.config import EngineConfig
from octavo.core.params import ParamError, SamplingParams

if TYPE_CHECKING:
    from octavo.core.loading.files import ModelFiles
    from octavo.core.loading.progress import Progress
    from octavo.core.loading.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Front:
    """Everything about a model that needs no device.

    name: what a server calls it. generation_config: the model's own, empty if it has none.
    """

    name: str
    tokenizer: Tokenizer
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    files: ModelFiles | None = None


def load_front(config: EngineConfig, progress: Progress | None = None) -> Front:
    """Finds (and fetches, if need be) the model's files and loads its tokenizer. Imports no torch.

    Raises:
        ModelError: there is no such model, or it is broken.
    """
    from octavo.core.entry.inputs import sampling_defaults
    from octavo.core.entry.wiring import resolve_model
    from octavo.core.loading.errors import ModelConfigError
    from octavo.core.loading.hf_config import load_generation_config
    from octavo.core.loading.tokenizer import load_tokenizer

    files = resolve_model(config, progress)
    generation_config = load_generation_config(files)
    try:  # else every request without parameters of its own would fail
        SamplingParams(**sampling_defaults(generation_config))
    except ParamError as error:
        raise ModelConfigError(
            f"{files.path / 'generation_config.json'} cannot be used: {error}"
        ) from None
    return Front(files.name, load_tokenizer(files), generation_config, files)


def load_progress(config: EngineConfig) -> Progress:
    """Bars or lines on standard error, or nothing, as the configuration says."""
    from octavo.core.loading.progress import SilentProgress, console_progress

    return console_progress() if config.load_progress else SilentProgress()
