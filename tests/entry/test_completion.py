"""`octavo completion`: the scripts, and what the shells make of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from octavo.core.entry.cli.completion import bash, commands, fish, zsh
from octavo.core.entry.cli.main import main


def bash_offers(folder: Path, *words: str) -> list[str]:
    script = folder / "octavo.bash"
    script.write_text(bash(list(commands())))
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _octavo\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("octavo", "ser"), ["serve"]),
        (("octavo", "serve", "--max-mod"), ["--max-model-len"]),
        (("octavo", "serve", "--dtype", "bf"), ["bfloat16"]),
        (("octavo", "serve", "--log-level", ""), ["debug", "info", "warning", "error"]),
        (("octavo", "serve", "--port", ""), []),
        (("octavo", "serve", ""), []),  # a file's name
        (("octavo", "models", "r"), ["remove"]),
        (("octavo", "models", "export", "--dt"), ["--dtype"]),
        (("octavo", "completion", "f"), ["fish"]),
    ],
)
def test_bash(tmp_path: Path, words: Any, offered: list[str]) -> None:
    assert bash_offers(tmp_path, *words) == offered


def test_device_words_are_those_of_this_machine() -> None:
    [serve] = [command for command in commands() if command.path == ("serve",)]
    [device] = [option for option in serve.options if option.flag == "--device"]
    assert {"auto", "cpu", "reference"} <= set(device.words)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_written(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", shell])
    text = capsys.readouterr().out
    assert "enable-prefix-caching" in text and "debug" in text
    found = shutil.which(shell)
    if found is not None:
        flag = "--no-execute" if shell == "fish" else "-n"
        done = subprocess.run([found, flag], input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_quotes_in_descriptions_do_not_end_them() -> None:
    known = list(commands())
    assert "model'\\''s" in fish(known) and "model'\\''s" in zsh(known)


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["completion", "tcsh"])
    assert caught.value.code == 2 and "tcsh" in capsys.readouterr().err
