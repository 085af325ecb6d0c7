"""Is it found, is the probe cheap, and does it keep Octavo's contract."""

import subprocess
import sys
from pathlib import Path

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
    # As a command, which sets up its threads before it imports torch; a test run that has imported
    # torch already may be ten times slower beside busy neighbours.
    octavo = Path(sys.executable).with_name("octavo")
    command = [str(octavo), "backend", "check", "mychip"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
