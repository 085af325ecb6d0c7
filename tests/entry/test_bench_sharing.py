"""`octavo bench sharing`: figures that can be worked out by hand, and the command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_model import byte_llama

from octavo.core.entry.bench.kv_waste import Lengths
from octavo.core.entry.bench.sharing import capped, replay_samples
from octavo.core.entry.cli.main import main


@pytest.mark.parametrize("width", [2, 3, 6])
def test_samples_share_the_full_blocks_of_their_prompt(width: int) -> None:
    """A prompt of 2 blocks and so many tokens that each sample has one block of its own while they run."""
    found = replay_samples("alpaca", [Lengths(8, 5)], width, slots=400, block_size=4)
    assert found.steps == 4
    assert found.saved == pytest.approx(2 * (width - 1) / (3 * width))


def test_a_started_block_is_shared_until_it_is_written() -> None:
    """10 prompt tokens: the third block is copied for all but one, so only the first two are saved."""
    found = replay_samples("alpaca", [Lengths(10, 3)], 2, slots=400, block_size=4)
    assert (found.steps, found.saved) == (2, pytest.approx(2 / 6))


def test_preempted_samples_share_their_prompt_again() -> None:
    trace = [Lengths(40, 40)] * 6
    roomy = replay_samples("alpaca", trace, 4, slots=10_000, block_size=4)
    tight = replay_samples("alpaca", trace, 4, slots=300, block_size=4)
    assert tight.steps > roomy.steps
    assert tight.saved > 0.6 * roomy.saved


def test_outputs_are_capped() -> None:
    assert capped([Lengths(9, 5), Lengths(2, 50)], 8) == [Lengths(9, 5), Lengths(2, 8)]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "s.json"
    config = byte_llama(tmp_path / "model") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 640}))
    main(
        [
            *f"bench sharing {config.parent} --device cpu --dtype float32".split(),
            *("--width", "2,4", "--requests", "2", "--sampled-requests", "20"),
            *("--max-output", "40", "--markdown"),
            *("--json", str(path), "--plot", str(tmp_path / "figures")),
        ]
    )
    text = capsys.readouterr().out
    savings = json.loads(path.read_text())["savings"]
    assert [(s["kind"], s["trace"], s["width"]) for s in savings] == [
        (kind, trace, width)
        for kind in ("samples", "beams")
        for trace in ("alpaca", "sharegpt")
        for width in (2, 4)
    ]
    for saving in savings:
        assert 0 < saving["saved"] < 1 - 1 / saving["width"]
        assert saving["requests"] == (20 if saving["kind"] == "samples" else 2)
        assert saving["output"] <= 40 or saving["kind"] == "samples"
        assert f"{100 * saving['saved']:.1f} %" in text
    assert text.count("| beams") == 4
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {"sharing.png", "sharing.svg"}
