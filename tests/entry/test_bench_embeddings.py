"""`octavo bench embeddings` on tiny models: both engines embed the same texts to the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sentence_models import decoder, encoder, save

from octavo.core.entry.bench.embeddings import pool
from octavo.core.entry.cli.main import main


def test_it_measures_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The head of the reference model has no part in it, so a whole model is needed."""
    from tiny_models import make

    folder = save(
        make("Llama", {"max_position_embeddings": 512}), tmp_path / "model", pooling="mean_tokens"
    )
    kept = tmp_path / "found.json"
    command = (
        f"bench embeddings --model {folder} --device cpu --dtype float32 --texts 3 --repeats 1"
    )
    main([*command.split(), "--json", str(kept)])
    shown = capsys.readouterr().out
    assert "mean pooling" in shown and "| octavo |" in shown and "batches of 32 by length" in shown
    found = json.loads(kept.read_text())
    assert len(found["rates"]) == 4 and all(rate["embeddings"] == 3 for rate in found["rates"])
    assert found["difference"] < 1e-5


@pytest.mark.parametrize("kind", ["mean", "last", "cls"])
def test_padding_counts_for_nothing(kind: str) -> None:
    hidden = torch.randn(2, 5, 4)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = pool(hidden, mask, kind)  # type: ignore[arg-type]
    for row, length in ((0, 3), (1, 5)):
        rows = hidden[row, :length]
        wanted = {"mean": rows.mean(0), "last": rows[-1], "cls": rows[0]}[kind]
        torch.testing.assert_close(found[row], wanted)


def test_a_plan_of_an_encoder_has_no_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(encoder("Bert"), tmp_path / "bert")
    main(["plan", "--model", str(folder), "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["block_bytes"] == 0 and found["max_model_len"] == 96
    headless = save(decoder("Llama"), tmp_path / "llama")
    main(["plan", "--model", str(headless), "--device", "cpu", "--json"])
    assert json.loads(capsys.readouterr().out)["block_bytes"] > 0
