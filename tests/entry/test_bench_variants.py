"""`octavo bench variants`, and the workload of structured output, on a tiny model whose tokens are bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_model import byte_llama

from octavo.core.entry.cli.main import main

SHARED = "a" * 70


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    workload = tmp_path / "load.jsonl"
    lines = [{"prompt": f"{SHARED} {i} {'b' * i}", "output_len": 8} for i in range(6)]
    workload.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = byte_llama(tmp_path / "model")
    words = f"bench variants {model} --device cpu --dtype float32 --block-size 16 --repeats 3"
    return [*words.split(), "--workload", str(workload)]


def test_the_command(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "v.json"
    drafts = '{"method": "ngram", "adaptive": false}'
    main(
        [
            *command,
            *("--variant", "no cache=--no-enable-prefix-caching"),
            *("--variant", f"drafts=--speculative-config '{drafts}'"),
            *("--json", str(path), "--markdown"),
        ]
    )
    text = capsys.readouterr().out
    found = json.loads(path.read_text())
    base, no_cache, drafting = found["variants"]
    assert [v["name"] for v in found["variants"]] == ["base", "no cache", "drafts"]
    assert base["cached"] > 0 == no_cache["cached"]
    assert base["ratios"] == [1.0, 1.0, 1.0] and base["ratio"] == 1
    assert drafting["drafted"] >= drafting["accepted"] > 0 == base["drafted"]
    for variant in found["variants"]:
        assert variant["same"] == variant["requests"] == 18
        assert variant["output"] > 0 and len(variant["ratios"]) == 3
    assert text.count("18 of 18") == 3


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("--no-enable-prefix-caching", "must be NAME=FLAGS"),
        ("base=--seed 1", "there twice, or is the command's own"),
        ("x=--max-num-seqz 4", "'x': unrecognized arguments: --max-num-seqz"),
        ("x=--max-num-seqs none", "'x': argument --max-num-seqs"),
        ("x=--threads 1", "'x' changes threads"),
        ("x=--kv-cache-dtype 'a", "'x': No closing quotation"),
    ],
)
def test_what_cannot_be_measured(
    command: list[str], variant: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, f"--variant={variant}"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_answers_within_a_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "j.json"
    config = byte_llama(tmp_path / "model") / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2048})
    )
    words = f"bench throughput {config.parent} --device cpu --dtype float32 --workload json"
    command = [*words.split(), "--num-requests", "2"]
    main([*command, "--profile", "--json", str(path)])
    found = json.loads(path.read_text())
    assert found["octavo"]["output_tokens"] == found["workload"]["output_tokens"] > 8
    assert 0 < found["profile"]["kernels"]["changing logits"] < 1
    assert "changing logits" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*command, "--compare", "transformers"])
    assert "structured output, which transformers has not" in capsys.readouterr().err
