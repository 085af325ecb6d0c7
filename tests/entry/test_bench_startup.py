"""`octavo bench startup`: parts that follow each other and add up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.core.engine import ModelInfo
from octavo.core.entry.bench import server_process, startup
from octavo.core.entry.cli.failure import CommandFailed
from octavo.core.entry.cli.main import main
from octavo.core.entry.server.run import banner

FAKES = Path(__file__).parents[1] / "fakes"

# The real child around the null engine: only what loads is replaced.
CHILD = """
import sys
from octavo.core.entry.bench import startup_child
from octavo import LLM
import null_engine, time
def load(config):
    time.sleep(0.05)
    return LLM.from_parts(config, null_engine.load(config), null_engine.NullEngine(config))
LLM.from_config = staticmethod(load)
startup_child.main(sys.argv[1:])
"""
NULL_CHILD = (sys.executable, "-c", CHILD)


def test_the_parts_of_generate_add_up() -> None:
    start = startup.start_generate(["--max-model-len=256"], NULL_CHILD)
    assert list(start.parts) == ["start Python", "import", "tokenizer", "weights", "first token"]
    assert all(seconds >= 0 for seconds in start.parts.values()), start.parts
    assert start.phases == {"weights": 0.01} and start.parts["weights"] == 0.01
    assert start.parts["tokenizer"] >= 0.04 - 1e-6  # what the phases leave of the loading
    assert start.total == pytest.approx(sum(start.parts.values()))
    assert start.model == "null (null, float32)"


def test_a_child_that_fails_tells_why() -> None:
    with pytest.raises(CommandFailed, match=r"ended with 3: .*no such thing"):
        code = "import sys; print('no such thing', file=sys.stderr); exit(3)"
        startup.start_generate([], (sys.executable, "-c", code))


def test_phases_are_read_from_the_servers_own_banner(model_info: ModelInfo) -> None:
    text = banner(model_info, ["m"], "http://127.0.0.1:1", 3.21)
    assert startup.banner_phases(f"something before\n{text}\nand after") == {
        "find device": 0.01, "import torch": 1.5, "load weights": 12.0,
    }  # fmt: skip
    assert startup.banner_phases("no banner") == {}


def test_the_banner_tells_of_host_memory(model_info: ModelInfo) -> None:
    import msgspec

    assert "swap" not in banner(model_info, ["m"], "x", 1.0)
    values = {"host_blocks": 7, "host_bytes": 3 << 20, "preemption_mode": "swap"}
    text = banner(msgspec.structs.replace(model_info, **values), ["m"], "x", 1.0)
    assert "  swap     7 blocks in 3.0 MiB of host memory, preemption by swap\n" in text


@pytest.fixture
def model_info() -> ModelInfo:
    import msgspec
    from null_engine import NullEngine

    from octavo.core.config import EngineConfig

    phases = {"find device": 0.01, "import torch": 1.5, "load weights": 12.0}
    return msgspec.structs.replace(NullEngine(EngineConfig()).info, phases=phases, notes=("a, b",))


def test_the_command_measures_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    asked: list[list[str]] = []

    def command(arguments: Any, port: int) -> list[str]:
        asked.append(list(arguments))
        return [sys.executable, str(FAKES / "null_server.py"), str(port)]

    monkeypatch.setenv("NULL_ENGINE_LOAD_SECONDS", "0.2")
    monkeypatch.setattr(server_process, "serve_command", command)
    monkeypatch.setattr(startup.start_generate, "__defaults__", (NULL_CHILD,))
    record = tmp_path / "s.json"
    arguments = ["bench", "startup", "--threads", "1", "--repeats", "1", "--json", str(record)]
    main([*arguments, "--plot", str(tmp_path / "p")])
    text = capsys.readouterr().out
    for word in ("generate: to the first token", "serve: to the first token", "engine: weights"):
        assert word in text
    assert asked == [["--threads=1"]] * 2  # one to warm up
    found = json.loads(record.read_text())["starts"]
    for kind in ("generate", "serve"):
        [run] = found[kind]["runs"]
        assert run["total"] == pytest.approx(sum(run["parts"].values()))
        assert found[kind]["total"]["mean"] == run["total"]
    assert list(found["serve"]["parts"]) == ["listen", "load", "first token"]
    assert found["serve"]["parts"]["listen"]["mean"] > 0
    assert found["serve"]["parts"]["load"]["mean"] > 0
    for suffix in ("png", "svg"):
        assert (tmp_path / "p" / f"startup.{suffix}").stat().st_size > 5000


def test_a_server_that_does_not_start_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print('it is broken', file=sys.stderr); exit(2)"
    monkeypatch.setattr(server_process, "serve_command", lambda *_: [sys.executable, "-c", code])
    with pytest.raises(SystemExit) as caught:
        main(["bench", "startup", "--what", "serve"])
    assert caught.value.code == 1
    assert "ended with exit code 2: it is broken" in capsys.readouterr().err


def test_what_to_start_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "startup", "--what", "train"])
    assert "generate, serve" in capsys.readouterr().err
