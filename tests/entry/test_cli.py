"""The command line: help, options, mistakes."""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import subprocess
import sys
from typing import Any

import pytest

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.entry.cli.main import COMMANDS, available, main
from octavo.core.entry.cli.options import add_engine_options, engine_config

OCTAVO = [sys.executable, "-m", "octavo.core.entry.cli.main"]


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": 60, **options}
    return subprocess.run([*OCTAVO, *arguments], **options)


def parse(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return engine_config(parser.parse_args(arguments))


def test_every_field_of_the_configuration_is_an_option() -> None:
    assert parse() == EngineConfig()
    config = parse(
        *("some/model", "--max-model-len", "512", "--kv-memory", "2G"),
        *("--no-enable-prefix-caching", "--kv-cache-dtype", "float16"),
    )
    assert config.model == "some/model" and config.max_model_len == 512
    assert config.kv_memory == 2 << 30 and config.kv_cache_dtype == "float16"
    assert config.enable_prefix_caching is False
    assert parse("--model", "m").model == "m"
    with pytest.raises(ConfigError, match="two models"):
        parse("a", "--model", "b")


HEAVY = {"torch", "transformers", "numpy", "msgspec", "tokenizers", "safetensors", "starlette",
         "uvicorn", "asyncio", "rich", "yaml", "jinja2", "huggingface_hub", "pluggy"}  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in COMMANDS if name in available())]
)
def test_help_is_quick_and_imports_little(arguments: list[str]) -> None:
    code = (
        "import sys; from octavo.core.entry.cli.main import main\n"
        f"try: main({arguments})\n"
        "except SystemExit as error: assert not error.code\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    imported = set(done.stderr.split())
    assert not HEAVY & imported, HEAVY & imported
    assert len(imported) < 250  # more is a library that came in unnoticed


def test_help_says_what_there_is() -> None:
    text = run("serve", "--help").stdout
    assert "--max-model-len" in text and "--served-model-name" in text and "--config" in text
    text = run("--help").stdout
    assert all(name in text for name in available()) and "130  ended by Ctrl-C" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no command"),
        (["serv"], "did you mean 'serve'"),
        (["serve", "--max-modl-len", "5"], "did you mean '--max-model-len'"),
        (["serve", "--max_model_len", "x"], "invalid int"),
        (["serve", "--kv-memory", "lots"], "not a size"),
        (["serve", "--dtype", "flaot16"], "did you mean 'float16'"),
        (["serve", "--port", "99999"], "cannot listen"),
        (["generate", "no-such-model", "--prompt", "x"], "no-such-model"),
        (["generate", "--prompt", "x", "--system", "y"], "--chat"),
        (["devices", "toaster"], "toaster"),
        (["models", "remove", "nothing-of-that-name"], "not in the cache"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("octavo: error: ") and words in stderr
    assert "Traceback" not in stderr


def test_a_server_without_a_model_says_why_and_leaves() -> None:
    done = run("serve", "no-such-model", "--port", "0")
    assert done.returncode == 2 and "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_the_prompt_may_come_from_standard_input() -> None:
    done = run("generate", "--device", "cpu", input="")
    assert done.returncode == 2 and "standard input is empty" in done.stderr
    parent, child = pty.openpty()
    done = run("generate", "--device", "cpu", stdin=child)
    os.close(parent)
    os.close(child)
    assert done.returncode == 2 and "--prompt" in done.stderr


def test_ctrl_c_is_130_without_a_traceback() -> None:
    command = [*OCTAVO, "generate", "--prompt", "x", "--max-tokens", "4000", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert "Traceback" not in process.stderr.read()
    process.stdout.close()
    process.stderr.close()


def test_devices_in_text_and_json() -> None:
    text = run("devices").stdout
    assert "cpu" in text and "reference" in text
    rows = json.loads(run("devices", "--json").stdout)
    assert {"cpu", "reference"} <= {row["word"] for row in rows}
    facts = json.loads(run("devices", "reference", "--json").stdout)
    assert facts["backend"] == "reference" and "float32" in facts["dtypes"]


def test_version() -> None:
    assert run("--version").stdout.startswith("octavo ")
