"""`octavo chat`: through a pipe, at a terminal, and with a server behind a URL."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.core.config import ConfigError
from octavo.core.entry.cli.main import main
from octavo.core.entry.cli.sampling import parse_typed
from octavo.core.entry.terminal.talk import complete
from octavo.core.params import ParamError

FAKES = Path(__file__).parents[1] / "fakes"
NULL = [sys.executable, str(FAKES / "null_chat.py")]
OCTAVO = [sys.executable, "-m", "octavo.core.entry.cli.main", "chat"]


def piped(*lines: str, command: list[str] = NULL) -> subprocess.CompletedProcess[str]:
    text = "\n".join(lines) + "\n"
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


class Terminal:
    """A child at a terminal of its own."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self.parent, child = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", **environment},
        )  # fmt: skip
        os.close(child)
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self.parent, text.encode())

    def wait_for(self, pattern: str, seconds: float = 30) -> str:
        """Reads until the pattern appears in what is new; returns what was read up to there."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.seen):
                text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
                return text
            if select.select([self.parent], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):
                    self.seen += os.read(self.parent, 65536).decode("utf-8", "replace")
        raise AssertionError(f"{pattern!r} did not come; got {self.seen!r}")

    def interrupt(self) -> None:
        """Sends what Ctrl-C sends, once the child waits for something.

        Python's line editor sees a signal that comes between two of its waits only with the next key.
        """
        child = psutil.Process(self.process.pid)
        deadline = time.monotonic() + 30
        while child.status() != psutil.STATUS_SLEEPING and time.monotonic() < deadline:
            time.sleep(0.01)
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.parent)


@pytest.fixture
def terminal() -> Iterator[Any]:
    opened: list[Terminal] = []

    def start(command: list[str], **environment: str) -> Terminal:
        opened.append(Terminal(command, **environment))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_each_piped_line_is_a_message() -> None:
    done = piped("say:Hello", "say:Bye")
    assert done.returncode == 0 and done.stdout == "Hello\nBye\n"
    assert "tokens/s" in done.stderr and ">" not in done.stderr


def test_the_conversation_grows_and_can_be_cut() -> None:
    done = piped("/system Be brief.", "say:a", "say:b", "/stats", "/undo", "/stats", "/reset",
                 "/stats", "/system -", "/undo")  # fmt: skip
    counts = re.findall(r"messages  (\d+)", done.stderr)
    assert counts == ["5", "3", "1"]
    assert "no system message" in done.stderr
    assert done.returncode == 1 and "there is no message yet" in done.stderr


def test_save_and_load(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    piped("/system S", "/set temperature 0.7", "say:a", f"/save {file}")
    record = json.loads(file.read_text())
    assert [m["content"] for m in record["messages"]] == ["S", "say:a", "a"]
    assert record["sampling"] == {"temperature": 0.7} and record["model"] == "null"
    done = piped(f"/load {file}", "/retry", "/history")
    assert done.stdout == "a\nS\nsay:a\na\n" and "3 messages from" in done.stderr
    file.write_text('[{"role": "tool", "content": "x"}]')
    assert "a message is {role" in piped(f"/load {file}").stderr


def test_several_lines() -> None:
    done = piped('"""one', "two", 'say:three"""', "/history", "a\\", "say:b", "/history")
    assert "one\ntwo\nsay:three\nthree\n" in done.stdout and "a\nsay:b\nb\n" in done.stdout


def test_a_slash_that_begins_a_message() -> None:
    done = piped("//say:x", "/history")
    assert "/say:x" in done.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sett temperature 1", "did you mean '/set'"),
        ("/set temprature 1", "did you mean 'temperature'"),
        ("/set temperature hot", "temperature must be a number"),
        ("/set top_p 7", "top_p must be a number in"),
        ("/set temperature", "needs a value"),
        ("/save", "needs a file"),
        ("/load /nowhere/x", "cannot be read"),
        ("/save /nowhere/x", "cannot be written"),
        ("refuse me", "needs 9 KV blocks"),
    ],
)
def test_a_mistake_in_a_pipe_ends_it(line: str, words: str) -> None:
    done = piped(line, "say:more")
    assert done.returncode != 0 and words in done.stderr and done.stdout == ""


def test_typed_values() -> None:
    assert parse_typed("top-k", "5") == 5 and parse_typed("ignore_eos", "on") is True
    assert parse_typed("stop", "\\n") == ["\n"] and parse_typed("stop_token_ids", "1, 2") == [1, 2]
    assert parse_typed("seed", "7") == 7 and parse_typed("seed", "default") is None
    with pytest.raises(ConfigError):
        parse_typed("n", "2")
    with pytest.raises(ParamError):
        parse_typed("temperature", "-1")


def test_completion_of_commands() -> None:
    assert complete("/un") == ["/undo "] and "temperature " in complete("/set te")
    assert complete("hello") == complete("/set temperature x") == []


def test_at_a_terminal(terminal: Any, tmp_path: Path) -> None:
    chat = terminal([*NULL, "", str(tmp_path / "history")])
    chat.wait_for("> ")
    chat.send("say:Hello there\r")
    chat.wait_for("Hello there\r\n.*tokens/s")
    chat.wait_for("> ")
    chat.send("/undoo\r")  # a mistake is told, and the chat goes on
    chat.wait_for("did you mean '/undo'")
    chat.wait_for("> ")
    chat.send("/sta\t\r")
    chat.wait_for("device .*null")
    chat.wait_for("> ")
    chat.send("/quit\r")
    assert chat.process.wait(10) == 0
    assert "say:Hello there" in (tmp_path / "history").read_text()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Any) -> None:
    chat = terminal(NULL, NULL_ENGINE_STEP_SECONDS="0.01")
    chat.wait_for("> ")
    chat.send("go on\r")
    chat.wait_for("quick brown")
    chat.interrupt()
    chat.wait_for(r"\[\d+ tokens.*stopped\]")
    chat.wait_for("> ")
    chat.send("say:still here\r")
    chat.wait_for("still here\r\n.*tokens")
    chat.wait_for("> ")
    chat.send("half a line")
    chat.wait_for("half a line")
    chat.interrupt()
    chat.wait_for("again at an empty line")
    chat.wait_for("> ")
    chat.interrupt()
    assert chat.process.wait(10) == 130


def test_ctrl_d_leaves(terminal: Any) -> None:
    chat = terminal(NULL)
    chat.wait_for("> ")
    chat.send("\x04")
    assert chat.process.wait(10) == 0


def test_what_a_model_writes_cannot_steer_the_terminal(terminal: Any) -> None:
    chat = terminal([sys.executable, "-c", (
        "import sys; sys.argv=['x']; from octavo.core.entry.terminal.talk import Chat\n"
        "from octavo.core.entry.terminal.partners import Piece\n"
        "class P:\n"
        "    name='p'; interruptible=True\n"
        "    def answer(self, m, v): yield Piece('A\\x1b]0;evil\\x07B\\r\\n', 1)\n"
        "    def facts(self): return []\n"
        "Chat(P()).run()")])  # fmt: skip
    chat.wait_for("> ")
    chat.send("x\r")
    assert "\x1b]0;" not in chat.wait_for(r"A\]0;evilB")


# ------------------------------------------------------------------------------- behind a URL


def test_a_server(server: Any) -> None:
    command = [*OCTAVO, "--url", f"{server.url}/v1", "--temperature", "0", "--system", "S"]
    done = piped("say:Hello", "/stats", "say:Bye", command=command)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Hello\nBye\n"
    assert server.url in done.stderr and "in context" in done.stderr and "6 tokens" in done.stderr


@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        (("--url", "ftp://x"), "is no address", 2),
        (("--url", "http://127.0.0.1:1/v1"), "cannot be reached", 2),
        (("--url", "URL"), "usually ends in /v1", 2),
        (("nonesuch", "--url", "URL/v1"), "is not served here; there is null", 2),
        (("--url", "URL/v1", "--max-num-seqs", "3"), "--max-num-seqs would configure", 2),
        (("--url", "URL/v1", "--temperature", "-1"), "temperature must be", 2),
        (("--api-key", "x"), "--api-key needs --url", 2),
    ],
)
def test_a_servers_mistakes(server: Any, options: Any, words: str, code: int) -> None:
    command = [*OCTAVO, *(option.replace("URL", server.url) for option in options)]
    done = piped("say:Hello", command=command)
    assert done.returncode == code and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_a_server_that_wants_a_key(own_server: Any) -> None:
    guarded = own_server(NULL_ENGINE_OPTIONS='{"api_keys": ["k"]}')
    guarded.wait_ready()
    command = [*OCTAVO, "--url", f"{guarded.url}/v1"]
    assert "give the key with --api-key" in piped("say:a", command=command).stderr
    assert piped("say:a", command=[*command, "--api-key", "k"]).stdout == "a\n"


def test_a_server_that_dies_in_the_middle(own_server: Any) -> None:
    doomed = own_server()
    doomed.wait_ready()
    done = piped("crash now", command=[*OCTAVO, "--url", f"{doomed.url}/v1"])
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr


def test_ctrl_c_with_a_server(own_server: Any, terminal: Any, tmp_path: Path) -> None:
    slow = own_server(NULL_ENGINE_STEP_SECONDS="0.01")
    slow.wait_ready()
    command = [*OCTAVO, "--url", f"{slow.url}/v1", "--no-history"]
    chat = terminal(command)
    chat.wait_for("> ")
    chat.send("go on\r")
    chat.wait_for("quick brown")
    chat.interrupt()
    chat.wait_for(r"\[\d+ tokens.*stopped\]")
    chat.wait_for("> ")
    chat.send("say:still here\r")
    chat.wait_for("still here\r\n.*tokens")


def test_behind_a_url_nothing_heavy_is_imported(server: Any) -> None:
    code = (
        "import sys; from octavo.core.entry.cli.main import main\n"
        f"main(['chat', '--url', '{server.url}/v1'])\n"
        "heavy = {'torch', 'transformers', 'starlette', 'tokenizers', 'rich', 'httpx'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = piped("say:a", command=[sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_chat_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "no-such-model"])
    assert "no-such-model" in capsys.readouterr().err
