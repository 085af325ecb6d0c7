"""The whole conformance kit over the strict chip."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOT_OFFERED = {"store_packed", "decoder_layer", "decoder_layers", "decoder_logits"}
"""Of the kit's operations, those that the chip has not."""


@pytest.mark.timeout(900)
def test_every_check_passes(chip: Any, scorecards: Path) -> None:
    from octavo.plugins.conformance.run import check, resolve

    resolved = resolve("strict")
    card = check(resolved.backend, resolved.device, word="strict", speed=False)
    card.write(scorecards / "strict.json")
    assert card.distribution == "octavo-strict"
    assert card.passed, [
        (row.op, row.dtype, row.state) for row in card.rows if row.state == "failed"
    ]
    left_out = {row.op for row in card.rows if row.group != "contract" and row.state != "passed"}
    assert left_out == NOT_OFFERED


def test_the_command_finds_the_package(installed: Path) -> None:
    """In a process of its own, as its author runs it."""
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); sys.argv = ['octavo', 'devices', '--json'];"
        "from octavo.core.entry.cli.main import main; main();"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert "strict" in json.dumps(rows)
