"""`octavo bench`: what is asked of the engine, how it is counted, and how differences are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.core.config import ConfigError
from octavo.core.entry.bench.compare import Comparison, Difference, first_difference
from octavo.core.entry.bench.machine import LoadMeter
from octavo.core.entry.bench.workload import BUILT_IN, make_workload, sharegpt_lengths


def by_word(text: str) -> list[int]:
    """A tokenizer that needs no model: a number for each word."""
    known: dict[str, int] = {}
    return [known.setdefault(word, len(known)) for word in text.split()]


def test_sharegpt_has_its_published_totals() -> None:
    """They are part of every figure quoted: a change of the drawing would make figures incomparable."""
    workload = make_workload("sharegpt", by_word)
    assert len(workload.items) == 64
    assert (workload.prompt_tokens, workload.output_tokens) == (11_418, 10_805)
    assert abs(workload.prompt_tokens / 11_413 - 1) < 0.03
    assert abs(workload.output_tokens / 10_806 - 1) < 0.03
    assert all(8 <= len(i.prompt_token_ids) <= 1024 for i in workload.items)
    assert all(8 <= i.output_len <= 500 for i in workload.items)
    assert sharegpt_lengths(3, 1) != sharegpt_lengths(3, 2)


@pytest.mark.parametrize("name", [n for n in BUILT_IN if n != "prefix"])
def test_no_two_prompts_share_a_block(name: str) -> None:
    """Nor does the warm-up with any of them: the prefix cache must find nothing."""
    workload = make_workload(name, by_word, num_requests=300)
    beginnings = {tuple(i.prompt_token_ids[:8]) for i in (*workload.items, *workload.warm_up)}
    assert len(beginnings) == 300 + len(workload.warm_up)


def test_prefix_shares_exactly_its_prefix() -> None:
    items = make_workload("prefix", by_word).items
    assert len({tuple(i.prompt_token_ids[:1024]) for i in items}) == 1
    assert len({tuple(i.prompt_token_ids[1024:]) for i in items}) == 32
    assert {(len(i.prompt_token_ids), i.output_len) for i in items} == {(1056, 32)}


def test_a_workload_can_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "one two three", "output_len": 5},
        {"prompt": [7, 8], "output_len": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    workload = make_workload(str(path), by_word)
    assert [(i.prompt_token_ids, i.output_len) for i in workload.items] == [
        ([0, 1, 2], 5),
        ([7, 8], 1),
    ]
    assert len(make_workload(str(path), by_word, num_requests=1).items) == 1


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '{"prompt": "a"}',
        '{"prompt": [], "output_len": 1}',
        '{"prompt": "a", "output_len": 0}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "fine", "output_len": 1}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2"):
        make_workload(str(path), by_word)


def test_an_unknown_workload_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'sharegpt'.*\.jsonl"):
        make_workload("sharegtp", by_word)


def test_a_misspelt_option_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    from octavo.core.entry.cli.main import main

    with pytest.raises(SystemExit, match="2"):
        main(["bench", "throughput", "--num-request", "4"])
    assert "did you mean '--num-requests'?" in capsys.readouterr().err


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1], [1, 3]) == 1


def test_only_a_tie_excuses_a_difference() -> None:
    from octavo.core.entry.cli.bench import _check_tokens
    from octavo.core.entry.cli.failure import CommandFailed

    def comparison(margin: float) -> Comparison:
        return Comparison(1, 1, 1, 1.0, 0, [Difference(0, 3, 1, 2, margin)], None, [[2]])

    _check_tokens(comparison(5e-4))
    with pytest.raises(CommandFailed, match=r"requests \[0\]"):
        _check_tokens(comparison(0.5))


def test_the_load_meter_knows_its_own_work() -> None:
    meter = LoadMeter()
    while (load := meter.read()) is not None and load.ours < 1e-6:
        sum(range(100_000))
    assert load is None or 0 <= load.others <= 1


def test_throughput_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command on the real model: figures that fit together, parts of a step that add up, and
    the timers gone afterwards."""
    from octavo.core.entry import wiring
    from octavo.core.entry.cli.main import main

    engines: list[Any] = []
    build = wiring.build_engine

    def build_and_keep(*args: Any, **kwargs: Any) -> Any:
        engines.append(build(*args, **kwargs))
        return engines[-1]

    monkeypatch.setattr(wiring, "build_engine", build_and_keep)
    path = tmp_path / "run.json"
    main(
        "bench throughput --workload uniform --num-requests 2 --profile --max-num-seqs 2 "
        f"--kv-memory 64M --json {path}".split()
    )
    (engine,) = engines
    assert "_build" not in vars(engine._runner) and "commit" not in vars(engine.scheduler)
    text = capsys.readouterr().out
    assert "320 prompt + 128 output tokens" in text
    record = json.loads(path.read_text())
    ours = record["octavo"]
    assert (ours["requests"], ours["prompt_tokens"], ours["output_tokens"]) == (2, 320, 128)
    assert ours["output_tokens_per_second"] == pytest.approx(128 / ours["seconds"])
    assert ours["host_seconds"] + ours["runner_seconds"] <= ours["seconds"]
    assert ours["cached_tokens"] == 0
    profile = record["profile"]
    assert profile["full_steps"]["sequences"] == 2
    parts = {k: v for k, v in profile["shares"].items() if k != "host"}
    assert set(parts) == {
        *("schedule", "build batch", "prepare", "forward", "sample", "commit", "detokenise")
    }
    assert sum(parts.values()) == pytest.approx(1) and min(parts.values()) > 0
    assert {"cpu", "cores", "versions", "torch_threads"} <= set(record["machine"])


@pytest.mark.slow
def test_compare_with_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same tokens from both, on real requests."""
    from octavo.core.entry.cli.main import main

    path = tmp_path / "run.json"
    main(
        "bench throughput --num-requests 4 --compare transformers --dtype float32 "
        f"--kv-memory 256M --json {path}".split()
    )
    assert "tokens equal to transformers': 4 of 4" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["transformers"]["output_tokens"] == record["octavo"]["output_tokens"]
    assert record["ratio_output"] > 0
