"""`octavo bench latency` on the null engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from null_engine import NullEngine, load

from octavo import LLM
from octavo.core.config import EngineConfig
from octavo.core.entry.bench import latency
from octavo.core.entry.cli.main import main
from octavo.core.params import ParamError


def null_llm(config: EngineConfig) -> LLM:
    return LLM.from_parts(config, load(config), NullEngine(config))


@pytest.fixture
def llm() -> LLM:
    return null_llm(EngineConfig(max_model_len=400))


def encode(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def test_every_token_of_every_repeat_is_timed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._engine, "_pause", 0.004)
    results = latency.measure(llm, encode, [20, 50], [1, 6], repeats=3, warm_up=1)
    assert list(results) == [(20, 1), (20, 6), (50, 1), (50, 6)]
    for (prompt, output), samples in results.items():
        assert len(samples) == 3
        for sample in samples:
            assert (sample.prompt_tokens, sample.output_tokens) == (prompt, output)
            assert len(sample.chunks) == output and len(sample.gaps) == output - 1
            assert 0.004 <= sample.ttft <= sample.e2e and sample.e2e >= 0.004 * output
            assert sample.e2e == pytest.approx(sample.ttft + sum(sample.gaps), abs=1e-6)
            if output == 1:
                assert sample.tpot is None
            else:
                assert sample.tpot == pytest.approx(sum(sample.gaps) / (output - 1), abs=1e-6)
    text = latency.table(latency.values(results))
    assert text.count("(E2E - TTFT) / (output tokens - 1)") == 1
    row = next(line for line in text.splitlines() if line.split()[:3] == ["20", "1", "TPOT"])
    assert row.split()[3:] == ["-"] * 5  # one token has no time per further token


def test_prompts_begin_differently(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[tuple[int, ...]] = []
    add = llm._engine.add
    monkeypatch.setattr(
        llm._engine, "add", lambda r: (prompts.append(tuple(r.prompt_token_ids[:16])), add(r))
    )
    latency.measure(llm, encode, [30], [2], repeats=8, warm_up=2)
    assert len(prompts) == len(set(prompts)) == 10


def test_a_request_that_does_not_fit_is_refused(llm: LLM) -> None:
    with pytest.raises(ParamError, match="400"):
        latency.measure(llm, encode, [500], [5], repeats=1, warm_up=1)


def test_the_command_writes_table_json_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(LLM, "from_config", staticmethod(null_llm))
    record = tmp_path / "l.json"
    arguments = ["bench", "latency", "--input-len", "10,40", "--output-len", "5", "--repeats", "4"]
    main([*arguments, "--json", str(record), "--plot", str(tmp_path / "p")])
    text = capsys.readouterr().out
    assert "null (null, float32), 4 requests one by one" in text and "TTFT" in text
    found = json.loads(record.read_text())
    assert [(c["input_len"], c["output_len"]) for c in found["cases"]] == [(10, 5), (40, 5)]
    for case in found["cases"]:
        assert len(case["repeats"]) == 4
        for key in latency.LATENCIES:
            assert 0 < case[key]["p50"] <= case[key]["p90"] <= case[key]["p99"]
        assert case["ttft"]["mean"] < case["e2e"]["mean"]
    for suffix in ("png", "svg"):
        assert (tmp_path / "p" / f"latency.{suffix}").stat().st_size > 5000


def test_lengths_must_be_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "latency", "--input-len", "10,0"])
    assert "at least 1" in capsys.readouterr().err
