"""`octavo bench perplexity`: the numbers against transformers, the comparison by hand, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import engine, make, prompt_of, reference

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.engine import ModelInfo
from octavo.core.entry.bench.perplexity import (
    Scores,
    compare,
    default_text,
    divergence,
    score,
    windows,
)
from octavo.core.entry.cli.bench_perplexity import variant, with_flags
from octavo.core.entry.cli.main import main


def test_windows() -> None:
    assert windows(range(10), 4, 9) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # the ninth would stand alone
    assert windows(range(10), 4, 10)[-1] == [8, 9]
    with pytest.raises(ConfigError, match="at least two tokens"):
        windows([1], 4, 10)
    assert len(default_text()) > 50_000


def test_scores_are_transformers(tmp_path: Path) -> None:
    model = make("Llama", {})
    model.save_pretrained(tmp_path)
    pieces = [prompt_of(40, 1), prompt_of(17, 2)]
    made = engine(tmp_path, max_num_batched_tokens=24)
    told: list[int] = []
    found = score(made, pieces, told.append)
    logs = [reference(model, piece, 1)[1][: len(piece) - 1] for piece in pieces]
    want = torch.cat(
        [log[range(len(piece) - 1), piece[1:]] for log, piece in zip(logs, pieces, strict=True)]
    )
    assert sum(told) == 57 and found.top_ids.shape == (55, 64)
    np.testing.assert_allclose(found.logprobs, want.numpy(), atol=2e-4)
    assert found.perplexity == pytest.approx(math.exp(-want.mean()), rel=1e-4)
    assert found.top_ids[:, 0].tolist() == torch.cat(logs).argmax(-1).tolist()
    with pytest.raises(ConfigError, match=r"windows of 200 tokens.*exceed.*lower --window"):
        score(made, [prompt_of(200)])


def scores(*rows: tuple[float, dict[int, float]], info: Any = None) -> Scores:
    """Scores with (probability of the token, probabilities of the most likely) for each position."""
    tops = [sorted(top.items(), key=lambda item: -item[1]) for _, top in rows]
    return Scores(
        info,
        np.log([p for p, _ in rows]),
        np.array([[i for i, _ in top] for top in tops]),
        np.log([[p for _, p in top] for top in tops]),
    )


def test_a_comparison_by_hand() -> None:
    first = scores((0.5, {1: 0.5, 2: 0.25}), (0.125, {1: 0.5, 2: 0.25}))
    other = scores((0.25, {1: 0.25, 2: 0.5}), (0.125, {2: 0.5, 3: 0.4}))
    one = 0.5 * math.log(2) + 0.25 * math.log(0.5) + 0.25 * math.log(0.25 / 0.25)
    two = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)  # token 2, and all others
    assert divergence(first, other) == pytest.approx((one + two) / 2)
    assert divergence(first, first) == 0
    row = compare("x", first, other)
    assert row.perplexity == pytest.approx((1 / (0.25 * 0.125)) ** 0.5)
    assert row.ratio == pytest.approx(2**0.5) and row.same_top == 0
    assert row.ratio_error == pytest.approx(row.ratio * math.log(2) / 2**0.5 / 2**0.5)


def test_divergence_is_a_lower_bound_of_the_whole() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((20, 500)) * 2
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits, logits + 0.3 * random.standard_normal((20, 500))))  # fmt: skip
    whole = (p * np.log(p / q)).sum(-1).mean()

    def top(x: Any) -> Scores:
        ids = np.argsort(-x, axis=-1)[:, :64]
        return Scores(None, x[:, 0], ids, np.log(np.take_along_axis(x, ids, -1)))  # type: ignore[arg-type]

    assert 0.5 * whole < divergence(top(p), top(q)) <= whole


def test_flags_of_a_variant() -> None:
    base = EngineConfig(device="cpu", max_num_seqs=3)
    made = with_flags(base, "--quantization int8 --kv-cache-dtype float32")
    assert (made.quantization, made.kv_cache_dtype, made.max_num_seqs) == ("int8", "float32", 3)
    assert variant("a=--dtype float16") == ("a", "--dtype float16") and variant("a=") == ("a", "")
    for flags in ("--quantisation int8", "--threads many", "--text 'x", "what"):
        with pytest.raises(ConfigError, match=r"--variant flags"):
            with_flags(base, flags)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2 on a little text: int8 within 2 % of float32, int4 within 4 %."""
    record = tmp_path / "p.json"
    arguments = ["bench", "perplexity", "--num-tokens", "512", "--window", "256"]
    arguments += ["--variant", "plain=--dtype float32", "--variant", "eight=--quantization int8"]
    arguments += ["--variant", "four=--quantization int4", "--device", "cpu"]
    main([*arguments, "--num-kv-blocks", "80", "--json", str(record)])
    text = capsys.readouterr().out
    assert "510 positions in windows of 256" in text and "int4 over float32" in text
    found = {row["name"]: row for row in json.loads(record.read_text())["variants"]}
    assert list(found) == ["plain", "eight", "four"]
    assert found["plain"]["ratio"] == 1 and found["plain"]["kl"] == 0
    assert abs(found["eight"]["ratio"] - 1) < 0.02 and 0 < found["eight"]["kl"] < 0.02
    assert abs(found["four"]["ratio"] - 1) < 0.04 and 0 < found["four"]["kl"] < 0.04
    info = found["four"]["engine"]
    assert ModelInfo(**info).numbers == "int4 over float32"
    assert info["kv_dtype"] == "float16" and found["four"]["flags"] == "--quantization int4"


def test_a_wrong_variant_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "perplexity", "--variant", "x"])
    assert "must be NAME=FLAGS" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "perplexity", "--variant", "x=--quantization int5", "--num-tokens", "20"])
    assert "'int5' is not known" in capsys.readouterr().err
