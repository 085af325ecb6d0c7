"""What can go wrong between a model's name and its weights, tokens and text."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be used as asked; the message says what was asked and what to change."""


class SourceError(ModelError):
    """MODEL names nothing that can be found or fetched."""


class CorruptFileError(ModelError):
    """A file is truncated, has a bad header or does not match its checksum."""


class ModelConfigError(ModelError):
    """A model's configuration is missing, unreadable or not one this engine can run."""


class WeightsError(ModelError):
    """Weights are missing, unexpected, misshapen or in a format that is not read."""


class TokenizerError(ModelError):
    """A tokenizer is missing, unreadable or of a kind that cannot be built."""


class TemplateError(ModelError):
    """A chat template is missing, does not render, or refused the conversation."""
