"""What a start imports, starts and touches: no more than it needs."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import make

from octavo.core.entry.engine_spawn import spawn_engine, spawned_ahead
from octavo.core.entry.preload import collector_paused, preload_torch

HEAVY = (
    *("transformers", "scipy", "sympy", "pandas", "matplotlib", "openai", "httpx", "psutil"),
    *("huggingface_hub", "safetensors", "gguf", "rich", "jinja2", "yaml", "filelock", "packaging"),
    *("torch._dynamo", "torch._inductor", "torch.utils.tensorboard"),
)
SERVING = ("starlette", "uvicorn", "httptools", "prometheus_client")
REPORT = "import json, sys; print('\\n' + json.dumps(sorted(sys.modules)))"

GENERATE = """
from octavo.core.entry.cli.main import main
main(["generate", "--prompt", "Hi", "--max-tokens", "1", "--device", "cpu", "--no-load-progress"])
"""
SERVE = """
from octavo.core.config import EngineConfig
from octavo.core.entry.server import run
from octavo.core.entry.front import load_front
load_front(EngineConfig(load_progress=False)).tokenizer.encode("Hi")
"""


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(code: str) -> set[str]:
    return set(json.loads(python(f"{code}\n{REPORT}").splitlines()[-1]))


def test_what_generate_imports() -> None:
    python(GENERATE)  # the first start may pack, and write what it packed
    found = imported(GENERATE)
    assert "torch" in found and not found & {*HEAVY, *SERVING}


def test_what_the_server_imports() -> None:
    found = imported(SERVE)
    assert "tokenizers" in found and not found & {*HEAVY, "torch"}


def test_the_library_is_there_before_torch_is_imported() -> None:
    python(
        "from octavo.core.config import prepare_thread_environment\n"
        "from octavo.core.entry.preload import preload_torch\n"
        "import os, sys\n"
        "prepare_thread_environment()\n"
        "thread = preload_torch()\n"
        "if len(os.sched_getaffinity(0)) < 2: sys.exit()\n"
        "thread.join()\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'libtorch_cpu.so' in open('/proc/self/maps').read()\n"
        "import torch\n"
        "assert (torch.ones(3) + 1).sum() == 6\n"
        "assert preload_torch() is None\n"
    )


def test_nothing_is_loaded_twice() -> None:
    import torch  # noqa: F401

    assert preload_torch() is None


def test_the_collector_works_again_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()  # as its owner wants it
    finally:
        gc.enable()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_that_nobody_took_over_is_ended() -> None:
    with pytest.raises(ZeroDivisionError), spawned_ahead() as spawned:
        pid = spawned.process.pid
        raise ZeroDivisionError
    assert spawned.process.returncode is not None and not alive(pid)


def test_one_that_was_taken_over_is_left_alone() -> None:
    with spawned_ahead() as spawned:
        spawned.taken = True
    assert spawned.process.poll() is None
    assert spawned.process.stdin is not None
    spawned.process.stdin.close()  # its parent is gone, as it must think
    assert spawned.process.wait(120) == 1
    spawned.link.close()


def test_a_spawned_process_waits_for_its_configuration() -> None:
    spawned = spawn_engine()
    try:
        time.sleep(0.2)
        assert spawned.process.poll() is None
    finally:
        spawned.process.kill()
        spawned.process.wait()
        spawned.link.close()


RESIDENT = """
import sys
from pathlib import Path
from tests.fakes.tiny_models import engine, greedy, prompt_of, run
folder = Path(sys.argv[1])
def resident():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10
for device in ("cpu", "reference"):
    run(engine(folder, device=device), greedy("a", prompt_of(20), 2))  # whatever the first one touches
    before = resident()
    made = engine(folder, device=device, num_kv_blocks=60_000)
    assert made.info.kv_bytes > 300 << 20, made.info.kv_bytes
    run(made, greedy("a", prompt_of(20), 2))
    assert resident() - before < 32 << 20, (device, resident() - before)
    del made
"""


def test_a_kv_cache_takes_memory_when_it_is_used(tmp_path: Path) -> None:
    make("Llama", {}).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
