"""Registers the `hpu` device with torch, as importing the vendor's package does."""

from habana_frameworks.torch import core, hpu

__all__ = ["core", "hpu"]
