"""Where and how a server listens: TLS, a Unix socket; and that it leaves either in good order."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from load import post
from scrape import wait_for

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return str(cert), str(key)


def drained(server: Any) -> list[str]:
    """Stops a server while it streams; the events that came."""
    events: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"prompt": "x", "max_tokens": 150, "stream": True}
        with server.http() as http, http.stream("POST", COMPLETIONS, json=body) as answer:
            for line in answer.iter_lines():
                begun.set()
                if line:
                    events.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(15) == 0, server.stderr.read_text()
    reader.join()
    assert "Traceback" not in server.stderr.read_text()
    return events


def test_tls(own_server: Any, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    options = {"ssl_certfile": cert, "ssl_keyfile": key, "shutdown_seconds": 5}
    server = own_server(NULL_ENGINE_OPTIONS=json.dumps(options), NULL_ENGINE_STEP_SECONDS="0.002")
    server.verify = ssl.create_default_context(cafile=cert)
    server.wait_ready()
    session = openai.DefaultHttpxClient(verify=server.verify)
    with server.client(http_client=session) as client:
        answer = client.completions.create(model="null", prompt="say:secret")
    assert answer.choices[0].text == "secret"
    with pytest.raises(httpx.TransportError):  # the certificate is nobody's whom we know
        httpx.get(f"{server.url}/health")
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        plain.settimeout(5)
        assert not plain.recv(100).startswith(b"HTTP/1.1 200")
    assert drained(server)[-1] == "data: [DONE]"
    assert "ready at https://127.0.0.1" in server.process.stdout.read()


def test_a_unix_socket(own_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "octavo.sock"
    with socket.socket(socket.AF_UNIX) as dead:  # a server that was killed left one
        dead.bind(str(path))
    options = json.dumps({"uds": str(path), "shutdown_seconds": 5})
    server = own_server(NULL_ENGINE_OPTIONS=options, NULL_ENGINE_STEP_SECONDS="0.002")
    server.uds = str(path)
    server.wait_ready()
    with server.http() as http:
        answer = http.post(COMPLETIONS, json={"prompt": "say:hi"})
    assert answer.json()["choices"][0]["text"] == "hi"
    second = own_server(NULL_ENGINE_OPTIONS=options)  # a living one is not pushed aside
    assert second.process.wait(15) == 1
    assert f"cannot listen at --uds {path}" in second.stderr.read_text()
    assert drained(server)[-1] == "data: [DONE]"
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_certfile": "/nowhere/c"}, "--ssl-certfile /nowhere/c cannot be used"),
        ({"max_queue": 0}, "max_queue must be at least 1"),
        ({"stall_seconds": -1}, "stall_seconds must be at least 0"),
        ({"allow_credentials": True, "allowed_origins": ["*"]}, "by name"),
        ({"uds": "/nowhere/s"}, "cannot listen at --uds /nowhere/s"),
        ({"host": "256.1.1.1"}, "cannot listen on 256.1.1.1"),
    ],
)
def test_mistakes_end_before_anything_is_loaded(options: dict[str, Any], words: str) -> None:
    from octavo.core.config import ConfigError, EngineConfig
    from octavo.core.entry.server.run import ServerOptions, serve

    with pytest.raises(ConfigError, match=words):
        serve(EngineConfig(model="null"), ServerOptions(**options), factory="nothing:at_all")


def test_a_signal_under_load(own_server: Any) -> None:
    """Many streams run and many requests wait; each gets its end or an error."""
    import asyncio

    server = own_server(
        NULL_ENGINE_ENGINE="hash_engine",
        HASH_ENGINE_STEP_SECONDS="0.01",
        NULL_ENGINE_OPTIONS='{"shutdown_seconds": 0.7}',
    )
    server.wait_ready()
    children = server.children()

    def received(count: int) -> None:
        with server.http() as http:
            found = wait_for(http, lambda now: now["requests_received_total"] >= count)
        assert found["requests_received_total"] == count

    async def storm() -> list[Any]:
        def body(stream: bool) -> dict[str, Any]:
            return {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": stream}

        tasks = [
            asyncio.ensure_future(post(server.port, COMPLETIONS, body(i % 2 == 0)))
            for i in range(60)
        ]
        await asyncio.to_thread(received, 60)
        server.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    replies = asyncio.run(storm())
    ended = time.monotonic()
    assert server.process.wait(15) == 0 and time.monotonic() - ended < 5
    streams = [r for r in replies if b"data: " in r.body]
    whole = [r for r in replies if b"data: " not in r.body]
    assert len(streams) + len(whole) == 60
    for reply in streams:
        last = reply.events()[-1]
        assert "error" in last or last["choices"][0]["finish_reason"] == "length"
    for reply in whole:
        assert reply.status in (200, 503) and reply.json()
    assert any(r.status == 503 or b'"error"' in r.body for r in replies)
    assert "Traceback" not in server.stderr.read_text()
    import psutil

    assert not any(psutil.pid_exists(pid) for pid in children)


def test_what_is_no_http_gets_an_error_in_the_same_form(server: Any) -> None:
    for sent in (
        b"\x16\x03\x01\x02\x00\x01\x00",  # TLS to a plain port
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            plain.settimeout(10)
            plain.sendall(sent)
            answer = b""
            while part := plain.recv(4096):
                answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400"), (sent, answer)
        assert json.loads(body)["error"]["code"] == "invalid_http"
