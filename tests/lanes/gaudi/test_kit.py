"""The whole conformance kit over the Gaudi backend, on the stand-in device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whole_kit import whole_kit

from octavo.backends.gaudi.backend import GaudiBackend

VENDORS = (
    "sdpa_recomp_fwd",
    "block_softmax",
    "block_softmax_adjustment",
    "rms_norm",
    "rotary_pos_embedding",
    "hpu_graph_capture",
    "hpu_graph_replay",
    "mark_step",
)
"""Calls without which the kit has gone past the backend's own operations."""


@pytest.mark.timeout(1200)
def test_every_check_passes(standin: Any, scorecards: Path) -> None:
    path = scorecards / "gaudi.json"
    whole_kit(
        GaudiBackend(),
        "hpu",
        "stand-in",
        path,
        {"store_packed", "decoder_layer", "decoder_layers", "decoder_logits"},
    )
    called = standin.ran()
    assert not [name for name in VENDORS if not called.get(name)]
