"""The scorecard as data, JSON, a page and a matrix; the command, and the checks as pytest items."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from octavo.core.entry.cli.main import main
from octavo.plugins.conformance import scorecard, support
from octavo.plugins.conformance.report import page
from octavo.plugins.conformance.run import matches
from octavo.plugins.conformance.scorecard import Result, Row, Scorecard, execution_of, gathered

ROOT = Path(__file__).parents[3]

RESULTS = [
    Result("linear/float32/plain/0", "op", "linear", "float32", "passed", "", 1e-7, 1e-5),
    Result("linear/float32/plain/1", "op", "linear", "float32", "failed", "off <b>", 3e-2, 1e-5),
    Result(
        "linear/float32/bias/0", "op", "linear", "float32", "failed", "worse", float("inf"), 1e-5
    ),
    Result("rotary/float32/0", "op", "rotary", "float32", "passed", "", 2e-7, 1e-5),
    Result("store_packed/float32/0", "op", "store_packed", "float32", "not offered", "no layout"),
]
CAPABILITIES = {
    "dtypes": ["float32"], "native_dtypes": ["float32"], "kv_dtypes": ["float32", "int8"],
    "block_sizes": [16, 32, 48, 64], "head_sizes": [8, 256, 8], "shapes": "static",
    "graph_capture": False, "swap": True, "quantization": [], "collectives": [],
    "seeded_sampling": True, "batch_invariant": False, "ops": {"linear": "fast", "rotary": "fast"},
    "notes": {"execution": "interpreted; rotary: device"},
}  # fmt: skip


def card() -> Scorecard:
    rows = gathered(
        RESULTS,
        word="chip",
        speeds={("linear", "float32"): (2.5, "8 rows, 1024 to 1024")},
        executions={"": "interpreted", "rotary": "device"},
        runs={"linear": "fast"},
    )
    return Scorecard(
        "chip",
        "chip:0",
        "octavo-chip",
        "0.1",
        (1, 1),
        "interpreted",
        False,
        3.0,
        rows,
        CAPABILITIES,
    )


def test_rows_tell_the_worst_case_and_the_first_failed_one() -> None:
    linear, rotary, packed = card().rows
    assert (linear.state, linear.cases, linear.failures) == ("failed", 3, 2)
    assert linear.error == float("inf") and linear.failing == "linear/float32/plain/1"
    assert linear.command == "octavo backend check chip --only 'linear/float32/plain/1'"
    assert (linear.speed, linear.runs, linear.execution) == (2.5, "fast", "interpreted")
    assert linear.speed_at == "8 rows, 1024 to 1024" and rotary.speed_at == ""
    assert (rotary.state, rotary.error, rotary.execution) == ("passed", 2e-7, "device")
    assert (packed.state, packed.cases, packed.detail) == ("not offered", 0, "no layout")
    assert not card().passed and [row.op for row in card().failed] == ["linear"]


def test_json_keeps_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    card().write(path)
    assert scorecard.read(path) == card()
    data = json.loads(path.read_text()) | {"format": 99}
    with pytest.raises(ValueError, match="format 99"):
        scorecard.from_dict(data)


def test_the_page_needs_nothing_beside_it() -> None:
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    text = page(card())
    parser.feed(text)
    assert {"table", "style", "code"} <= set(tags) and not {"script", "link", "img"} & set(tags)
    assert "off &lt;b&gt;" in text and "--only &#x27;linear/float32/plain/1" in text
    assert "http" not in text
    assert "<td>2.50x</td><td>8 rows, 1024 to 1024</td>" in text


@pytest.mark.parametrize(
    ("note", "op", "where"),
    [
        (None, "linear", "device"),
        ("stand-in", "linear", "stand-in"),
        ("stand-in (an emulator); linear: device", "linear", "device"),
        ("stand-in (an emulator); linear: device", "rotary", "stand-in"),
        ("compiled; linear: interpreted", "linear", "interpreted"),
        ("compiled; linear: interpreted", "rotary", "compiled"),
    ],
)
def test_where_an_op_ran(note: str | None, op: str, where: str) -> None:
    assert execution_of({"execution": note} if note else {}, op) == where


def test_what_it_ran_on_is_told() -> None:
    notes = {"execution": "stand-in (an emulator); linear: device"}
    row = support.of_capabilities("toy", "toy", {"notes": notes})
    assert (row.execution, row.executed_on) == ("stand-in", "an emulator")


def test_a_word_for_where_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match=r"'moon'.*device, stand-in, interpreted, compiled"):
        execution_of({"execution": "moon"}, "linear")


@pytest.mark.parametrize(
    ("name", "pattern", "meant"),
    [
        ("linear/float32/plain/1", "linear", True),
        ("linear/float32/plain/1", "linear/float32/plain/1", True),
        ("linear/float32/plain/11", "linear/float32/plain/1", False),
        ("linear/float32/plain/1", "*/plain/*", True),
        ("linear/float32/plain/1", "plain/*", False),
    ],
)
def test_patterns(name: str, pattern: str, meant: bool) -> None:
    assert matches(name, pattern) == meant


# --------------------------------------------------------------------------------- the matrix


def test_the_matrix_is_what_the_script_makes() -> None:
    done = subprocess.run([sys.executable, "ci/make_support_matrix.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run: python ci/make_support_matrix.py"


def test_scorecards_that_are_kept_passed() -> None:
    kept = [scorecard.read(path) for path in sorted((ROOT / "docs" / "support").glob("*.json"))]
    assert {"cpu", "reference", "strict", "gaudi", "ascend", "triton"} <= {c.backend for c in kept}
    assert all(c.passed and len(c.rows) > 25 for c in kept)
    assert all(str(Path.home()) not in json.dumps(c.as_dict()) for c in kept)


def test_a_line_of_the_matrix() -> None:
    row = support.of_scorecard(card())
    assert (row.passed, row.failed, row.not_offered) == (1, 1, 1)
    assert row.block_sizes == "16, 32, … 64" and row.head_sizes == "8 to 256, multiples of 8"
    assert row.execution == "interpreted" and row.executions == {"rotary": "device"}
    other = replace(card(), device="other", rows=(Row("op", "embedding", "float32", "passed", 1),))
    text = support.page([card(), other])
    assert f"No device ran these: `{row.backend}`, `{row.backend}`." in text
    ran = support.page([replace(card(), execution="device", capabilities={})])
    assert "No device ran" not in ran
    assert "| `linear` | failed |  |" in text and "| `embedding` |  | passed (device) |" in text


# ------------------------------------------------------------------------- command and items


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "card.json", tmp_path / "card.html"]
    arguments = ["backend", "check", "reference", "--only", "act_and_mul/float32"]
    main([*arguments, "--json", str(files[0]), "--html", str(files[1])])
    out = capsys.readouterr().out
    assert "act_and_mul" in out and "1 passed, 0 failed" in out
    made = scorecard.read(files[0])
    assert made.passed and made.distribution == "octavo" and made.rows[0].speed is not None
    assert files[1].read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "no backend takes --device 'nothing'"),
        (["cpu", "--device", "reference"], "belongs to backend 'reference', not to 'cpu'"),
        (["cpu", "--only", "nothing"], "--only 'nothing' matches no check"),
        (["cpu", "--json", "/no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["backend", "check", *arguments])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_a_failure_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octavo.plugins.conformance.truth.activation", lambda x, kind: x)
    with pytest.raises(SystemExit) as ended:
        main(["backend", "check", "reference", "--only", "act_and_mul/float32/silu/0"])
    out = capsys.readouterr().out
    assert ended.value.code == 1 and "1 failed" in out
    assert "alone: octavo backend check reference --only 'act_and_mul/float32/silu/0'" in out


def test_every_check_is_a_pytest_item(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "octavo.plugins.conformance.pytest_plugin", "-rs", "-v",
         "--octavo-device=reference", "--octavo-only=*/float32/0"],
        cwd=tmp_path, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    out = done.stdout
    assert done.returncode == 0, out + done.stderr
    assert "rms_norm/float32/0" in out and "test_own" not in out
    assert "1 skipped" in out and "packed weights are not kept" in out
