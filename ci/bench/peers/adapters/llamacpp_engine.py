"""llama.cpp: its server over HTTP, and llama-batched-bench. options: model, server, bench, slots."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from peers.adapters.child import main
from peers.job import Item, Job

HOST = "127.0.0.1"
_READY_SECONDS, _ANSWER_SECONDS = 300.0, 3600.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """llama-server. A slot has room for the longest request; the client asks for all at once."""

    def __init__(self, job: Job) -> None:
        options, self._port = job.options, _free_port()
        slots = min(options["slots"], len(job.items)) if not job.sequential else 1
        context = slots * (-(-(job.longest + 8) // 256) * 256)
        command = [
            options["server"], "-m", options["model"], "--host", HOST, "--port", str(self._port),
            "-t", str(job.threads), "-tb", str(job.threads), "-np", str(slots), "-c", str(context),
            "--threads-http", str(max(8, len(job.items))), *options["arguments"],
        ]  # fmt: skip
        self.spawned = time.monotonic()
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        self.pids = [self._process.pid]
        self.notes = {"command": " ".join(command[5:])}
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> None:
        while time.monotonic() < self.spawned + _READY_SECONDS:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"llama-server ended with exit code {code}")
            try:
                if self._ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.01)
        raise RuntimeError(f"llama-server was not ready within {_READY_SECONDS:g} s")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=_ANSWER_SECONDS)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def run(self, items: list[Item]) -> list[list[int]]:
        found: list[list[int] | Exception] = [RuntimeError("no answer") for _ in items]

        def one(index: int, item: Item) -> None:
            try:
                found[index] = self._complete(item)
            except Exception as error:
                found[index] = error

        threads = [threading.Thread(target=one, args=pair) for pair in enumerate(items)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tokens = []
        for result in found:
            if isinstance(result, Exception):
                raise result
            tokens.append(result)
        return tokens

    def _complete(self, item: Item) -> list[int]:
        body = {
            "prompt": item.prompt,
            "n_predict": item.output,
            "ignore_eos": True,
            # Only this sampler: greedy, and no time spent on those that would change nothing.
            "samplers": ["top_k"],
            "top_k": 1,
            "return_tokens": True,
            "cache_prompt": True,
        }
        status, answer = self._ask("POST", "/completion", body)
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {answer}")
        if answer["tokens_evaluated"] != len(item.prompt) or answer["truncated"]:
            raise RuntimeError(f"llama-server took {answer['tokens_evaluated']} prompt tokens")
        tokens: list[int] = answer["tokens"]
        return tokens

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def batched(job: Job) -> dict[str, Any]:
    """llama-batched-bench: prefill and decode tokens per second at several widths.

    Every batch has the first item's lengths; the widths are in options["widths"].
    """
    options, item = job.options, job.items[0]
    widths = options["widths"]
    command = [
        options["bench"], "-m", options["model"], "-t", str(job.threads), "-tb", str(job.threads),
        "-npp", str(len(item.prompt)), "-ntg", str(item.output),
        "-npl", ",".join(map(str, widths)), "-c", str(job.longest * max(widths)),
        "--output-format", "jsonl", *options["arguments"],
    ]  # fmt: skip
    started = time.monotonic()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"llama-batched-bench ended with exit code {done.returncode}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if [row["pl"] for row in rows] != widths:
        raise RuntimeError(f"llama-batched-bench printed {done.stdout!r}")
    return {
        "seconds": time.monotonic() - started,
        "batched": [
            {"width": row["pl"], "prefill": row["speed_pp"], "decode": row["speed_tg"]}
            for row in rows
        ],
    }


if __name__ == "__main__":
    main(Server, batched)
