"""How far from float64 an operation's result may be.

An error is |got - exact| / (|exact| + rms), the largest of a tensor, with the rms over the exact result's row
(its last dimension): relative where a number is large, and against its row where it is small. Inputs are rounded before the exact result is
taken, so what is left is the operation's own arithmetic and the rounding of its result.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from octavo.plugins.conformance.truth import Array

TOLERANCE: Mapping[str, float] = {
    "float64": 1e-10,
    "float32": 2e-5,  # sums of some thousand products; tf32 and bf16 arithmetic are beyond it
    "float16": 5e-3,  # some roundings of 5e-4
    "bfloat16": 3e-2,  # some roundings of 4e-3
}
"""Of results in a dtype."""

KV_TOLERANCE: Mapping[str, float] = {"int8": 6e-2, "fp8": 1.5e-1}
"""Of attention over a cache whose rounding is the backend's own affair."""

KV_RMS_TOLERANCE: Mapping[str, float] = {"fp8": 1e-1}
"""The same, of rms over rms, in formats so coarse that the worst of thousands of numbers has no bound that
would tell a fault from rounding: three bits of mantissa move a score by a tenth now and then."""

FORM_TOLERANCE: Mapping[str, float] = {"int8": 1.5e-2, "int4": 1.5e-2}
"""Of products with given codes, whose activations may be rounded to 8 bits: rms of the error over rms of
the result."""

QUANTIZED_TOLERANCE: Mapping[str, float] = {"int8": 2e-2, "int4": 1.6e-1}
"""The same of products with float weights that the backend quantises."""

LOGPROB_TOLERANCE: Mapping[str, float] = {
    "float32": 2e-3,
    "float16": 3e-2,
    "bfloat16": 2e-1,
    "int8": 1e-1,
    "int4": 1e-1,
}
"""Of a tiny model's log-probabilities through the whole engine: mean distance from the portable ops', in
the widest rounding that takes part."""

TIE: Mapping[str, float] = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}
"""Tokens whose log-probabilities are nearer than this may change places; they are counted."""


def distance(got: Array, exact: Array) -> float:
    """The error of a tensor; infinite where a number is missing, NaN or of another shape."""
    if got.shape != exact.shape:
        return float("inf")
    if not exact.size:
        return 0.0
    if not np.isfinite(got).all():
        return float("inf")
    size = np.sqrt(np.mean(exact * exact, axis=-1, keepdims=True))
    size = np.where(size > 0, size, 1.0)
    return float((np.abs(got - exact) / (np.abs(exact) + size)).max())


def rms_distance(got: Array, exact: Array) -> float:
    """rms(got - exact) / rms(exact)."""
    if got.shape != exact.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact * exact)))
