"""torch-npu installed, CANN not, and nothing set in the environment: other devices work, and it is explained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

MAIN = "from octavo.core.entry.cli.main import main; main()"


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environ["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)


def test_torch_alone_cannot_be_imported_here() -> None:
    """What the engine has to survive."""
    done = python("import torch")
    assert done.returncode != 0 and "torch_npu" in done.stderr


def test_devices_explains_it() -> None:
    done = python(MAIN, "devices")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("npu ")]
    for words in (
        "without CANN",
        "libascendcl.so",
        "set_env.sh",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
    ):
        assert words in line
    assert any(row.startswith("cpu ") for row in done.stdout.splitlines())


def test_asking_for_the_device_explains_it() -> None:
    done = python(MAIN, "devices", "npu")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "without CANN" in done.stderr


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_other_devices_generate(llama: tuple[Path, Any], device: str) -> None:
    folder, _ = llama
    words = {f"w{i}": i for i in range(101)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    code = (
        "import sys\nfrom octavo import LLM, SamplingParams\n"
        "llm = LLM(model=sys.argv[1], device=sys.argv[2], num_kv_blocks=20)\n"
        "out = llm.generate([{'prompt_token_ids': [1, 2, 3]}], SamplingParams(max_tokens=3))\n"
        "assert 'torch_npu' not in sys.modules\n"
        "print(len(out[0].outputs[0].token_ids))"
    )
    done = python(code, str(folder), device)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"]


def test_nothing_of_the_vendors_is_imported() -> None:
    code = (
        "import sys, octavo\nfrom octavo.plugins.manager import plugins\n"
        "plugins().devices()\nassert not {'torch', 'torch_npu'} & set(sys.modules)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
