"""Writes docs/support-matrix.md from the scorecards in docs/support/.

`python ci/make_support_matrix.py` writes it; with `--check` it only says whether the page is current.
A scorecard comes from `octavo backend check NAME --json docs/support/NAME.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.plugins.conformance.scorecard import read
from octavo.plugins.conformance.support import page

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "support-matrix.md"


def made() -> str:
    """The page as it should be."""
    return page([read(path) for path in sorted((DOCS / "support").glob("*.json"))])


def main() -> int:
    text = made()
    if "--check" in sys.argv:
        return 0 if PAGE.is_file() and PAGE.read_text("utf-8") == text else 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
