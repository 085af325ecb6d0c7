"""The page of compiled Triton kernels says what its JSON says, and nothing in it spills or does not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))

import triton_aot
from triton_chips import CHIPS


def test_the_page_is_made_from_its_json() -> None:
    text = triton_aot.DATA.read_text("utf-8")
    data = json.loads(text)
    assert triton_aot.page(data) == triton_aot.PAGE.read_text("utf-8")
    assert triton_aot.as_text(data) == text
    assert data["archs"] == list(CHIPS) and len(data["rows"]) <= data["offered"]
    for row in data["rows"]:
        chip = CHIPS[row["arch"]]
        assert row["shared"] <= chip.shared and 0 < row["occupancy"] <= 1, row
        assert 0 < row["registers"] <= (255 if chip.backend == "cuda" else 512), row
