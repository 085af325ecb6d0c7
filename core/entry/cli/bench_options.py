"""Options that the benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def count(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def counts(text: str) -> list[int]:
    """One `count` or several, separated by commas."""
    return [count(part) for part in text.split(",")]


def add_output_options(group: Any) -> None:
    """Where a measurement goes beside standard output."""
    group.add_argument("--json", type=Path, metavar="FILE", help="write everything measured here")
    group.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="write figures here, as PNG and SVG (needs octavo[bench])",
    )
