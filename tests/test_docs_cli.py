"""The examples of docs/cli.md run as they stand there."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
# Starting an engine takes seconds, so the fast lane runs a few; `-m slow` runs the others.
FAST = ("--show-config", "octavo chat", "--batch", "octavo completion")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, marks=() if any(w in block for w in FAST) else pytest.mark.slow)
        for i, block in enumerate(BLOCKS)
    ],
)
def test_an_example(number: int, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", BLOCKS[number]],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if number == 0:
        assert re.search(r"port: 9001 +# OCTAVO_PORT", done.stdout)
        assert re.search(r"max_num_seqs: 8 +# --max-num-seqs", done.stdout)
        assert re.search(r"kv_memory: 536870912 +# octavo.yaml", done.stdout)


def test_every_command_has_its_words() -> None:
    from octavo.core.entry.cli.main import COMMANDS, available

    text = PAGE.read_text("utf-8")
    for name in available():
        assert f"octavo {name}" in text and COMMANDS[name]


def test_every_kind_of_bench_has_its_options() -> None:
    """Those that no engine has, and that are not the same for all kinds."""
    from octavo.core.entry.cli.main import command_parser
    from octavo.core.entry.cli.options import add_engine_options

    engine = argparse.ArgumentParser()
    add_engine_options(engine)
    common = {*engine._option_string_actions, "--json", "--plot", "--markdown"}
    parser, _ = command_parser("bench")
    kinds = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    rows = re.findall(
        r"^\| `([a-z-]+)` \| [^|]* \| ([^|]*) \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    told = {name: set(re.findall(r"`(--[a-z-]+)`", options)) for name, options in rows}
    model = {"kv-waste"}  # has no engine, so what is an engine's elsewhere is its own
    for name, kind in kinds.choices.items():
        own = set(kind._option_string_actions)
        own -= {"--json", "--plot", "--markdown"} if name in model else common
        own = {word for word in own if not word.startswith(("--no-", "-h", "--help", "--debug"))}
        assert told[name] == own, name
