"""The whole conformance kit over the Triton backend, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_kit import whole_kit

from octavo.backends.triton.backend import KERNEL_OPS, TritonBackend


@pytest.mark.timeout(1800)
def test_every_check_passes(scorecards: Path) -> None:
    path = scorecards / "triton.json"
    backend = TritonBackend("cuda:interpret")
    left_out = {"store_packed", "decoder_layer", "decoder_layers", "decoder_logits"}
    card = whole_kit(backend, "cuda:interpret", "interpreted", path, left_out)
    runs = {row.op: row.runs for row in card.rows if row.group == "op"}
    kernels = {op for op in runs if op in KERNEL_OPS}
    assert {runs[op] for op in kernels} == {"triton, interpreted"}
    assert set(KERNEL_OPS) - kernels == {"export_blocks", "import_blocks"}  # one row for both
