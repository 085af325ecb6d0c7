"""The whole conformance kit over the Ascend backend, through torch-npu's schemas and CPU bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bodies
import pytest
from whole_kit import whole_kit

pytestmark = pytest.mark.timeout(1200)

VENDORS = (
    "_npu_reshape_and_cache",
    "_npu_paged_attention",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
)
"""Operations without whose calls the kit has gone past the backend's own."""


def kit(backend: Any, dtype: str, path: Path) -> None:
    backend.dtypes = (dtype,)
    whole_kit(
        backend,
        "npu",
        "stand-in",
        path,
        {"store_packed", "decoder_layer", "decoder_layers", "decoder_logits"},
    )
    assert not [name for name in VENDORS if not bodies.calls[name]]


def test_every_check_passes(backend: Any, scorecards: Path) -> None:
    """In the numbers that the backend declares."""
    kit(backend, "bfloat16", scorecards / "ascend.json")


def test_every_check_passes_in_float32(backend: Any, tmp_path: Path) -> None:
    """Where rounding hides nothing."""
    kit(backend, "float32", tmp_path / "ascend.json")
