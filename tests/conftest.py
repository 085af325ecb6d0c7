"""What all tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.core.config import prepare_thread_environment

prepare_thread_environment()  # before any test imports torch, as the engine's own doors do


_TOGETHER = {
    f"tests/entry/test_{name}.py": "the real server"
    for name in ("beams", "real_model", "responses", "structured")
}
"""Files that share what takes long to start: one process runs them all."""

_LONGEST = (
    "tests/plugins/conformance/test_kit.py",
    "tests/models/test_smollm2.py",
    "the real server",
    "tests/core/test_scheduler_properties.py",
    "tests/entry/test_server_errors.py",
    "tests/entry/test_tools_real.py",
    "tests/models/test_combinations.py",
    "tests/kernels/test_attention.py",
    "tests/models/test_draft_model.py",
    "tests/test_cpu_peers.py",
    "tests/entry/test_startup.py",
    "tests/entry/test_chat.py",
)
"""What begins first where several processes share the work, so that none is left with a long file at
the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, with the longest files first instead of those of the most tests."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return _TOGETHER.get(file, file)

    config.option.loadscopereorder = False
    return LongestFirst(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):  # in one process, files stay in their order
        return
    last = len(_LONGEST)
    place = {name: at for at, name in enumerate(_LONGEST)}

    def when(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        return place.get(_TOGETHER.get(file, file), last)

    items.sort(key=when)


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
