"""A served process around the null engine, and clients for it."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

FAKES = Path(__file__).parents[1] / "fakes"


@pytest.fixture(autouse=True)
def _children_find_the_null_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKES))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    stderr: Path
    uds: str | None = None
    verify: ssl.SSLContext | bool = True  # a context: it speaks https

    @property
    def url(self) -> str:
        scheme = "http" if self.verify is True else "https"
        return f"{scheme}://127.0.0.1:{self.port}"

    def http(self, timeout: float = 60) -> httpx.Client:
        transport = httpx.HTTPTransport(verify=self.verify, uds=self.uds)
        return httpx.Client(base_url=self.url, timeout=timeout, transport=transport)

    def client(self, **options: Any) -> openai.OpenAI:
        options.setdefault("max_retries", 0)
        options.setdefault("api_key", "none")
        return openai.OpenAI(base_url=f"{self.url}/v1", timeout=60, **options)

    def wait_ready(self, seconds: float = 60) -> None:
        self.wait_for(lambda status: status == 200, seconds)

    def wait_for(self, wanted: Any, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        with self.http(timeout=5) as probe:
            while time.monotonic() < deadline:
                assert self.process.poll() is None, self.stderr.read_text()
                try:
                    if wanted(probe.get("/health").status_code):
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.02)
        raise AssertionError("the server did not get there: " + self.stderr.read_text())

    def children(self) -> list[int]:
        import psutil

        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def start_server(folder: Path, *names: str, **environment: str) -> Server:
    return launch(folder, [str(FAKES / "null_server.py"), "PORT", *names], **environment)


def launch(folder: Path, arguments: list[str], **environment: str) -> Server:
    """Runs python with these arguments, PORT replaced by a free one."""
    port = free_port()
    stderr = folder / f"server-{port}.log"
    with stderr.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *(str(port) if a == "PORT" else a for a in arguments)],
            env={**os.environ, "PYTHONPATH": str(FAKES), **environment},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    return Server(process, port, stderr)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that do not break it."""
    started = start_server(
        tmp_path_factory.mktemp("server"), "null", "org/name", NULL_ENGINE_STEP_SECONDS="0.0005"
    )
    started.wait_ready()
    yield started
    assert started.stop() == 0, started.stderr.read_text()
    assert "Traceback" not in started.stderr.read_text()


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`octavo serve` with SmolLM2-135M-Instruct on the CPU and a context of 256 tokens."""
    options = {"--device": "cpu", "--max-model-len": "256", "--max-num-seqs": "8"}
    started = launch(
        tmp_path_factory.mktemp("real"),
        ["-m", "octavo.core.entry.cli.main", "serve", "--port", "PORT"]
        + [word for option in options.items() for word in option],
    )
    started.wait_ready(240)
    yield started
    assert started.stop() == 0, started.stderr.read_text()
    assert "Traceback" not in started.stderr.read_text()


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same model with int4 weights."""
    command = "serve --port PORT --device cpu --quantization int4 --max-model-len 128"
    started = launch(
        tmp_path_factory.mktemp("small"),
        ["-m", "octavo.core.entry.cli.main", *command.split(), "--max-num-seqs", "2"],
    )
    started.wait_ready(240)
    yield started
    assert started.stop() == 0, started.stderr.read_text()
    assert "Traceback" not in started.stderr.read_text()


@pytest.fixture(scope="session", name="launch_server")
def _launch_server() -> Any:
    """`launch`, for fixtures of other modules."""
    return launch


@pytest.fixture(scope="session", name="start_server")
def _start_server() -> Any:
    """`start_server`, for fixtures of other modules."""
    return start_server


TOOL_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think></think>' }}"
    "{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The null engine behind a template that takes tools, in Hermes' form, and may open <think>."""
    started = start_server(
        tmp_path_factory.mktemp("tools"),
        NULL_ENGINE_TEMPLATE=TOOL_TEMPLATE,
        NULL_ENGINE_STEP_SECONDS="0.001",
        NULL_ENGINE_OPTIONS='{"reasoning_parser": "qwen3"}',
    )
    started.wait_ready(60)
    yield started
    assert started.stop() == 0, started.stderr.read_text()
    assert "Traceback" not in started.stderr.read_text()


@pytest.fixture(scope="session")
def tool_template() -> str:
    return TOOL_TEMPLATE


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Any]:
    """Starts servers that a test may break; what still runs is killed at the end."""
    started: list[Server] = []

    def start(*names: str, **environment: str) -> Server:
        started.append(start_server(tmp_path, *names, **environment))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        if one.process.stdout is not None:
            one.process.stdout.close()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as session:
        yield session
