"""What the README and docs tell a reader to type, typed. `docs/cli.md` has a test of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOY = ROOT / "plugins" / "examples" / "octavo-toy"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Walked from the first line to the last by tests/test_docs_plugins.py.
WALKED = ("cli.md", "tutorial.md")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What continuous integration runs on a fresh clone, and what another test runs for real.
ELSEWHERE = {
    "make serve": "ci/newcomer",
    "make test": ".ci/run",
    "pip install .": "tests/test_packaging.py",
    "octavo serve --port 8000": "tests/test_docs.py",
    "pip install --no-deps ./plugins/examples/octavo-toy": "tests/plugins/test_third_party.py",
    "pip install --no-deps ./plugins/examples/octavo-fast-norm": "tests/plugins/test_fast_norm.py",
    'octavo generate --device cpu --ops-from none --prompt "Hello" --max-tokens 8': "tests/plugins/test_fast_norm.py",
    'octavo generate --device toy --prompt "Hello" --max-tokens 8': "tests/plugins/test_third_party.py",
}
# They need somebody to talk to, a file or a server: the tests of docs/cli.md, of the client below, of
# `octavo bench serve` and of the server's load have them.
TALKS = (
    "octavo chat",
    "octavo generate --batch",
    "curl ",
    "octavo bench serve --url",
    "export PYTHONPATH=tests/fakes",
    "NULL_ENGINE_",
    "python tests/fakes/load.py",
    "ci/lane ",  # tests/test_lanes.py, and .ci/run
    "python ci/make_workflow.py",  # tests/test_lanes.py
    "python ci/bench/cpu_peers.py",  # installs gigabytes; tests/test_cpu_peers.py has its parts
)
# In an environment that a lane makes (the test below says which), or on a machine with the chip.
LANES = (
    "python3 -m venv ",
    "xla-env/bin/",
    "pallas-env/bin/",
    "PYTHONPATH=src pallas-env/bin/",
    "pytest tests/lanes/",
    "pip install 'octavo[triton]'",
    "ci/device_check.sh ",
    "octavo serve MODEL ",  # no model of a reader's is here; tests/models/test_speculation.py drafts
)
QUICK = (
    "octavo backend check cpu --only",
    "octavo devices",
    "octavo models",
    "octavo serve --help",
)


def blocks(kind: str) -> list[tuple[str, str]]:
    return [
        (page.name, body)
        for page in PAGES
        if page.name not in WALKED
        for language, body in FENCE.findall(page.read_text("utf-8"))
        if language == kind
    ]


def commands() -> list[str]:
    lines = [line for _, body in blocks("sh") for line in body.splitlines()]
    return sorted({line.partition("  #")[0].strip() for line in lines} - {""})


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path}


LESS = {  # a benchmark on little work: here it must run, not measure
    "octavo bench throughput --busy-neighbour": "--workload uniform --num-requests 1",
    "octavo bench throughput": "--num-requests 2 --max-num-seqs 2",
    "octavo bench serve": "--num-requests 2 --workload single",
    "octavo bench latency": "--output-len 4 --repeats 1",
    "octavo bench startup": "--repeats 1",
    "octavo bench roofline": "--prefill 32 --batch 2 --context 32 --repeats 2",
    "octavo bench linear": "--rows 2 --passes 1",
    "octavo bench scaling": "--batch 1,2 --context 64,128 --repeats 2",
    "octavo bench perplexity": "--num-tokens 64",
    "octavo bench sharing": "--width 2 --trace alpaca --sampled-requests 10 --requests 2 --max-output 16",
    "octavo bench embeddings": "--texts 2 --repeats 1",
}


def shortened(command: str) -> str:
    """The command, with less work where it is a benchmark. The last of two equal options counts."""
    less = next((words for start, words in LESS.items() if command.startswith(start)), "")
    return f"{command} {less}"


def runnable() -> Iterator[object]:
    for command in commands():
        if command in ELSEWHERE or command.startswith(TALKS + LANES):
            continue
        marks = () if command.startswith(QUICK) else pytest.mark.slow
        yield pytest.param(command, marks=marks, id=command)


@pytest.mark.parametrize("command", list(runnable()))
def test_command(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", shortened(command)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "Traceback" not in done.stderr


@pytest.mark.parametrize(("command", "where"), ELSEWHERE.items())
def test_command_that_runs_elsewhere(command: str, where: str) -> None:
    assert command in commands(), "no page has it any more"
    script = (ROOT / where).read_text("utf-8")
    words = ("octavo-toy", "octavo-fast-norm", "--ops-from", "toy", "--port", "install")
    assert command in script or any(w in command and w in script for w in words)


def test_what_lanes_run_is_in_a_lane() -> None:
    lanes = (ROOT / "ci" / "lanes.py").read_text("utf-8")
    named = set()
    for command in commands():
        if command.startswith(LANES):
            named |= set(re.findall(r"(?:tests/lanes|ci)/[\w./]+", command))
    for path in named - {"ci/device_check.sh"}:
        assert (ROOT / path).exists(), path
        requirements = re.fullmatch(r"ci/requirements/(\w+)\.txt", path)
        assert (f'requirements="{requirements[1]}"' if requirements else path) in lanes, path
    assert {"tests/lanes/xla", "ci/xla_aot.py", "ci/requirements/xla.txt"} <= named
    for start in LANES:
        assert any(c.startswith(start) for c in commands()), f"no page has {start!r} any more"


def test_the_tutorials_files_are_the_examples() -> None:
    page = (ROOT / "docs" / "plugins" / "index.md").read_text("utf-8")
    for name in ("pyproject.toml", "octavo_toy.py"):
        assert (TOY / name).read_text("utf-8").strip() in page, name


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)#][^)]*)\)", prose):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        found = page.parent / path
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text("utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings]
            assert anchor in slugs, target


# They define plug-ins and print nothing: the tests below and tests/test_docs_plugins.py run them.
PLUGINS = tuple(p.name for p in (ROOT / "docs" / "plugins").glob("*.md"))
SNIPPETS = [
    pytest.param(body, id=f"{page}-{n}")
    for n, (page, body) in enumerate(blocks("python"))
    if "OpenAI(" not in body and page not in PLUGINS
]


@pytest.mark.slow
@pytest.mark.parametrize("code", SNIPPETS)
def test_python(code: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(code)
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=1200, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_plugin_page_snippet_overrides_an_op() -> None:
    import torch

    body = next(b for p, b in blocks("python") if p == "operations.md" and "class ToyOps" in b)
    names: dict[str, object] = {}
    exec(body, names)
    ops = names["ToyBackend"]().ops("toy")  # type: ignore[operator]
    x = torch.randn(3, 8)
    gate, up = x.chunk(2, dim=-1)
    assert torch.allclose(ops.act_and_mul(x.clone(), "silu"), torch.nn.functional.silu(gate) * up)
    assert torch.allclose(ops.act_and_mul(x, "gelu"), torch.nn.functional.gelu(gate) * up)


@pytest.mark.slow
def test_the_readmes_client_against_a_server(tmp_path: Path) -> None:
    body = next(b for p, b in blocks("python") if p == "README.md" and "OpenAI(" in b)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    octavo = shutil.which("octavo", path=environment()["PATH"])
    assert octavo
    server = subprocess.Popen([octavo, "serve", "--port", str(port)], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 200
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        curl = next(c for c in commands() if c.startswith("curl "))
        reply = subprocess.run(
            ["bash", "-c", curl.replace("127.0.0.1:8000", f"127.0.0.1:{port}")],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert "Paris" in reply.stdout, reply.stderr
        code = body.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=200
        )
        assert "Paris" in done.stdout, done.stderr
    finally:
        server.terminate()
        assert server.wait(30) == 0
