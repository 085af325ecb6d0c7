"""`octavo generate`: prompts from everywhere, answers anywhere, OpenAI batch files."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import null_engine
import openai
import pytest

from octavo.core.config import EngineConfig
from octavo.core.entry.batch_file import BatchCounts, run_batch
from octavo.core.entry.cli.main import main
from octavo.core.entry.llm import LLM


@pytest.fixture(autouse=True)
def _null(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_config(config: EngineConfig) -> LLM:
        return LLM.from_parts(config, null_engine.load(config), null_engine.NullEngine(config))

    monkeypatch.setattr(LLM, "from_config", from_config)


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> tuple[str, str]:
        main(["generate", *arguments])
        return capsys.readouterr()

    return call


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["generate", *arguments])
    assert caught.value.code == code
    text = capsys.readouterr().err
    assert "octavo: error: " in text and "Traceback" not in text
    return text


def written(folder: Path, *lines: Any) -> str:
    path = folder / "in.jsonl"
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return str(path)


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_prompt_streams_and_several_come_in_order(generate: Any) -> None:
    out, err = generate("--prompt", "say:one")
    assert out == "one\n" and "tokens/s" in err
    out, err = generate("--prompt", "say:longer than the other", "--prompt", "say:two")
    assert out == "longer than the other\ntwo\n" and "2 prompts" in err


def test_lines_of_json(generate: Any, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"prompt": "say:abc", "id": 7},
        "\n",
        {"prompt_token_ids": [3 + byte for byte in b"say:xyz"], "max_tokens": 2},
        {"messages": [{"role": "user", "content": "say:hi"}], "stop": ["i"]},
        {"prompt": "say:n", "n": 2, "logprobs": 2, "temperature": 0, "logit_bias": {"5": 1}},
    )
    out, _ = generate("--input", path, "--json", "--max-tokens", "9")
    first, second, third, fourth = rows(out)
    assert first["text"] == "abc" and first["id"] == 7 and first["index"] == 0
    assert second["text"] == "xy" and second["finish_reason"] == "length" and "id" not in second
    assert third["text"] == "h" and third["stop_reason"] == "i"
    assert [sample["text"] for sample in fourth["outputs"]] == ["n", "n"]
    assert len(fourth["outputs"][0]["logprobs"]) == 2  # the one that ends it among them


def test_standard_input(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("say:whole text\n"))
    assert generate()[0] == "whole text\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "say:a"}\n{"prompt": "say:b"}'))
    assert generate("--input", "-")[0] == "a\nb\n"


def test_output_into_a_file(generate: Any, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    out, _ = generate("--prompt", "say:ä", "--output", str(target), "--json")
    assert out == "" and rows(target.read_text("utf-8"))[0]["text"] == "ä"


def test_a_chat_with_a_system_message(generate: Any) -> None:
    out, _ = generate("--prompt", "say:x", "--chat", "--system", "S", "--json")
    assert rows(out)[0]["prompt"] == "<s>system: S\nuser: say:x\nassistant: "


def test_every_sampling_parameter_is_a_flag(generate: Any) -> None:
    from octavo.core.entry.cli.sampling import SAMPLING
    from octavo.core.params import SamplingParams

    own = {"output_kind", "detokenize", "seed", "spaces_between_special_tokens"}
    assert set(SAMPLING) == set(SamplingParams.__struct_fields__) - own
    out, _ = generate(
        *("--prompt", "say:abcabc", "--stop", "c", "--stop", "z", "--bad-words", "q", "--json"),
        *("--logit-bias", "5:-1", "--logit-bias", "6:2.5", "--include-stop-str-in-output"),
        *("--top-k", "5", "--stop-token-ids", "9", "--no-skip-special-tokens", "--seed", "3"),
    )
    assert rows(out)[0]["text"] == "abc"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "x", "--top-p", "7"), "top_p must be"),
        (("--prompt", "x", "--logprobs", "0"), "--logprobs needs --json"),
        (("--prompt", "x", "--prompt-logprobs", "2"), "--prompt-logprobs needs --json"),
        (("--prompt", "x", "--logit-bias", "5"), "is not ID:BIAS"),
        (("--prompt", "x", "--input", "y"), "not both"),
        (("--input", "/nowhere"), "cannot be read"),
        (("--prompt", "x", "--output", "/nowhere/x"), "cannot be written"),
        (("--batch", "x", "--prompt", "y"), "--prompt does not go with --batch"),
        (("--batch", "x", "--top-k", "0"), "--top-k does not go with --batch"),
        (("--batch", "/nowhere"), "cannot be read"),
        (("--prompt", "refuse me"), "needs 9 KV blocks"),
    ],
)
def test_mistakes(arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not valid JSON"),
        ({"text": "x"}, "line 2: a line is an object with one of prompt"),
        ({"prompt": "x", "messages": []}, "with one of"),
        ({"prompt": 5}, "prompt must be text"),
        ({"messages": "x"}, "messages must be a list"),
        ({"prompt": "x", "temprature": 1}, "did you mean 'temperature'"),
        ({"prompt": "x", "temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias maps"),
        ({"prompt_token_ids": [999]}, "line 2: prompt has token id 999"),
    ],
)
def test_a_bad_line_is_named(
    line: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, "--input", written(tmp_path, {"prompt": "say:a"}, line))


def test_an_empty_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no prompts" in refused(capsys, "--input", written(tmp_path, "\n"))


def test_what_is_done_is_written_when_the_run_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, {"prompt": "go on", "max_tokens": 1000}, {"prompt": "say:done"})
    steps = 0
    step = null_engine.NullEngine.step

    def interrupted(engine: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 50:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(null_engine.NullEngine, "step", interrupted)
    target = tmp_path / "out"
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--input", path, "--json", "--output", str(target)])
    assert caught.value.code == 130
    assert [row["text"] for row in rows(target.read_text())] == ["done"]


# ------------------------------------------------------------------------------- batch files


def batch(*lines: bytes, **options: Any) -> tuple[list[dict[str, Any]], BatchCounts]:
    out: list[bytes] = []
    counts = asyncio.run(
        run_batch(
            EngineConfig(model="org/null", load_progress=False, **options),
            lines,
            out.append,
            factory="null_engine:build",
            loader=null_engine.load,
        )
    )
    return [json.loads(line) for line in out], counts


def line(number: Any, url: str = "/v1/chat/completions", **body: Any) -> bytes:
    if url.endswith("chat/completions"):
        body.setdefault("messages", [{"role": "user", "content": f"say:{number}"}])
    value = {"custom_id": str(number), "method": "POST", "url": url, "body": body}
    return json.dumps(value).encode() + b"\n"


def test_a_batch_is_answered_by_the_servers_endpoints() -> None:
    answers, counts = batch(
        *(line(i, model="null") for i in range(200)),
        b"\n",
        line("done", "/v1/completions", prompt="say:whole", model="org/null", echo=True),
        line("items", "/v1/responses", input="say:three", model="null"),
        max_num_seqs=4,
    )
    assert (counts.completed, counts.failed) == (202, 0) and counts.tokens > 400
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert len(by_id) == 202 and len({answer["id"] for answer in answers}) == 202
    for i in range(200):
        response = by_id[str(i)]["response"]
        assert response["status_code"] == 200 and by_id[str(i)]["error"] is None
        parsed = openai.types.chat.ChatCompletion.model_validate(response["body"])
        assert parsed.choices[0].message.content == str(i)
    assert by_id["done"]["response"]["body"]["choices"][0]["text"] == "say:wholewhole"
    made = by_id["items"]["response"]["body"]
    assert made["output"][0]["content"][0]["text"] == "three" and made["status"] == "completed"


def test_a_lines_mistake_is_its_own() -> None:
    answers, counts = batch(
        b"nonsense\n",
        b'{"custom_id": "lost", "body": {}}\n',
        b'{"custom_id": "odd", "url": "/v1/completions", "body": {}, "extra": 1}\n',
        line("url", "/v1/rerank"),
        line("twice"),
        line("twice"),
        line("stream", stream=True),
        line("events", "/v1/responses", input="say:x", stream=True),
        line("kept", "/v1/responses", input="say:x", store=True),
        line("field", tempreature=1),
        line("model", model="other"),
        line("refused", messages=[{"role": "user", "content": "refuse me"}]),
        line("good"),
    )
    assert (counts.completed, counts.failed) == (2, 11)
    by_id: dict[Any, list[Any]] = {}
    for answer in answers:
        by_id.setdefault(answer["custom_id"], []).append(answer)
    assert by_id[None][0]["error"]["code"] == "invalid_json"
    assert "url" in by_id["lost"][0]["error"]["message"]
    assert "extra" in by_id["odd"][0]["error"]["message"]
    assert "/v1/chat/completions" in by_id["url"][0]["error"]["message"]
    assert sorted(a["error"] is None for a in by_id["twice"]) == [False, True]
    for name, status, words in (
        ("stream", 400, "no use in a batch"),
        ("events", 400, "no use in a batch"),
        ("kept", 400, "keeps no responses"),
        ("field", 400, "did you mean 'temperature'"),
        ("model", 404, "is not served here"),
        ("refused", 400, "needs 9 KV blocks"),
    ):
        response = by_id[name][0]["response"]
        assert response["status_code"] == status
        assert words in response["body"]["error"]["message"]


def test_an_engine_that_dies_fails_the_lines_and_not_the_run() -> None:
    crash = line("crash", messages=[{"role": "user", "content": "crash now"}])
    answers, counts = batch(line("a"), crash, *(line(i) for i in range(300)), max_num_seqs=1)
    assert len(answers) == 302 and counts.failed > 0
    assert {a["response"]["status_code"] for a in answers} <= {200, 503}


def test_a_batch_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from octavo.core.entry import batch_file

    async def nulled(config: Any, *arguments: Any, **options: Any) -> Any:
        options |= {"factory": "null_engine:build", "loader": null_engine.load}
        return await run_batch(config, *arguments, **options)

    monkeypatch.setattr(batch_file, "run_batch", nulled)
    path, target = written(tmp_path, line(1).decode(), line(2).decode()), tmp_path / "out"
    main(["generate", "--batch", path, "--output", str(target)])
    assert {row["custom_id"] for row in rows(target.read_text())} == {"1", "2"}
    assert "[2 completed, 0 failed" in capsys.readouterr().err
    assert "would overwrite" in refused(capsys, "--batch", path, "--output", path)
    path = written(tmp_path, line(1).decode(), "nonsense\n")
    assert "1 of 2 lines failed" in refused(capsys, "--batch", path, code=1)


def test_ctrl_c_keeps_what_a_batch_has_done(tmp_path: Path) -> None:
    code = (
        "import sys, null_engine\n"
        "from octavo.core.entry import batch_file\n"
        "from octavo.core.entry.cli.main import main\n"
        "run = batch_file.run_batch\n"
        "batch_file.run_batch = lambda *a, **k: run(\n"
        "    *a, **k, factory='null_engine:build', loader=null_engine.load)\n"
        "main(['generate', '--batch', sys.argv[1]])"
    )
    endless = line("endless", messages=[{"role": "user", "content": "go on"}], ignore_eos=True)
    path = written(tmp_path, line("quick").decode(), *[endless.decode()] * 3)
    process = subprocess.Popen(
        [sys.executable, "-c", code, path],
        env={**os.environ, "NULL_ENGINE_STEP_SECONDS": "0.01"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    seen = [json.loads(process.stdout.readline())["custom_id"] for _ in range(3)]
    assert sorted(seen) == ["endless", "endless", "quick"]  # two of the three for being repeats
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors, errors
