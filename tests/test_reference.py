"""docs/reference.md says what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "ci" / "make_reference.py"


def test_the_reference_is_current_and_complete() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, "run: python ci/make_reference.py\n" + done.stderr


def test_the_check_can_fail(tmp_path: Path) -> None:
    """On another page it does: --check compares, it does not just run."""
    copy = tmp_path / "ci" / "make_reference.py"
    copy.parent.mkdir()
    copy.write_text(SCRIPT.read_text("utf-8"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "reference.md").write_text("# Something else\n")
    assert subprocess.run([sys.executable, str(copy), "--check"], check=False).returncode == 1
