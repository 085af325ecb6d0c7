"""Is it found, is the probe cheap, and does it keep Octavo's contract."""

import subprocess
import sys

from octavo.plugins.conformance.run import check, resolve
from octavo.plugins.manager import plugins


def test_it_is_found() -> None:
    found = plugins()
    assert not [p for p in found.problems if "octavo_mychip" in p.plugin]
    row = next(r for r in found.devices() if r.word == "mychip")
    assert (row.backend, row.distribution) == ("mychip", "octavo-mychip")


def test_importing_it_imports_no_torch() -> None:
    code = "import octavo_mychip, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_keeps_the_contract() -> None:
    found = resolve("mychip")
    card = check(found.backend, found.device, speed=False)
    assert card.passed, [(row.detail, row.command) for row in card.failed]
