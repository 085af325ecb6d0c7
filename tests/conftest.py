"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.config import prepare_thread_environment

prepare_thread_environment()  # before any test imports torch, as the engine's own doors do


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--scorecards", type=Path, metavar="FOLDER", help="where a lane's whole kits leave theirs"
    )


@pytest.fixture
def scorecards(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder for scorecards: the one that `--scorecards` names, or one that is thrown away."""
    folder: Path = request.config.getoption("--scorecards") or tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    return folder
