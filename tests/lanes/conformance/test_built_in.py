"""The whole conformance kit over the backends that every installation has: some minutes on two cores."""

from __future__ import annotations

import pytest

from octavo.kernels import cpu as kernels
from octavo.plugins.conformance.run import check
from octavo.plugins.manager import plugins


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("word", ["cpu", "reference"])
def test_the_whole_kit(word: str) -> None:
    resolved = plugins().resolve(word)
    card = check(resolved.backend, resolved.device)
    assert card.passed, [(row.failing, row.detail) for row in card.failed]
    assert card.count("passed") > 60
    if word == "cpu":  # a failed compile installs too, with the portable ops
        assert kernels.available(), kernels.why_unavailable()
        assert {
            row.state
            for row in card.rows
            if row.op in ("decoder_layer", "decoder_layers", "decoder_logits")
        } == {"passed"}
