"""`octavo plan` says before loading what loading comes to."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from octavo.core.config import EngineConfig, parse_bytes
from octavo.core.entry.cli.main import main
from octavo.core.entry.cli.plan import text
from octavo.core.entry.cli.sizes import count_text, size_text
from octavo.core.entry.fit import Fit, fit
from octavo.core.loading.errors import WeightsError

GIB = 1 << 30


def tiny(folder: Path, **changes: Any) -> Path:
    """A Llama of random weights that nobody will read."""
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, **changes,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if "vocab_size" not in changes:
        save_file({"model.embed_tokens.weight": torch.zeros(320, 64)}, folder / "x.safetensors")
    return folder


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A folder with a configuration and no weights, as a hub gives it to `octavo plan`."""
    folder = tiny(tmp_path / "bare")
    (folder / "x.safetensors").unlink()
    return str(folder)


def test_it_agrees_with_the_engine() -> None:
    from octavo.core.entry.wiring import build_engine

    config = EngineConfig(device="cpu", kv_memory=64 << 20, max_num_seqs=4, load_progress=False)
    planned = fit(config)
    engine = build_engine(config)
    info = engine.info
    engine.shutdown()
    assert planned.fits and planned.weight_bytes == info.weight_bytes
    assert (planned.num_kv_blocks, planned.block_size) == (info.num_kv_blocks, info.block_size)
    assert planned.num_kv_blocks * planned.block_bytes == info.kv_bytes
    assert planned.max_model_len == info.max_model_len and planned.notes == info.notes
    assert planned.max_num_batched_tokens == info.max_num_batched_tokens
    # 30 layers of 3 heads of 64 for K and V in float32
    assert planned.kv_bytes_per_token == 30 * 3 * 64 * 2 * 4


def test_counts(bare: str) -> None:
    config = EngineConfig(model=bare, device="reference", max_num_seqs=8, num_kv_blocks=65)
    result = fit(config, memory=GIB, typical_len=100)
    assert result.cache_tokens == 1024 and result.max_model_len == 512
    assert result.concurrent_at_max_model_len == 2  # 32 blocks each, of 64
    assert result.typical_len == 100 and result.concurrent_at_typical_len == 8  # 7 blocks each
    assert result.limit is not None and result.limit.startswith("max_num_seqs")
    assert "unchecked" in result.notes[-1]


@pytest.mark.parametrize(
    ("options", "limit", "advice"),
    [
        ({"num_kv_blocks": 9}, "num_kv_blocks", "--num-kv-blocks"),
        ({"kv_memory": 64 << 10}, "kv_memory", "--kv-memory"),
        ({"kv_fraction": 0.0002}, "kv_fraction", "--kv-fraction"),
    ],
)
def test_what_binds_and_that_the_advice_helps(
    bare: str, options: Any, limit: str, advice: str
) -> None:
    config = EngineConfig(model=bare, device="reference", max_num_seqs=16, **options)
    result = fit(config, memory=GIB, typical_len=32)
    assert result.limit is not None and limit in result.limit
    assert result.concurrent_at_typical_len < 16
    flag, value, *rest = result.advice[0].split()
    assert flag == advice and rest[-4:] == ["16", "run", "at", "once"]
    name = advice[2:].replace("-", "_")
    better: Any = {"num_kv_blocks": int, "kv_memory": parse_bytes, "kv_fraction": float}[name](
        value
    )
    again = fit(config.with_values(**{name: better}), memory=GIB, typical_len=32)
    assert again.concurrent_at_typical_len == 16


def test_host_memory(bare: str) -> None:
    config = EngineConfig(model=bare, device="reference", num_kv_blocks=65)
    plain, swapping = fit(config, memory=GIB), fit(config.with_values(swap_space=0.25), memory=GIB)
    assert plain.host_bytes == 0 and "swap" not in text(plain)
    assert swapping.host_bytes == GIB // 4
    blocks = swapping.host_bytes // swapping.block_bytes
    assert f"swap      {blocks} blocks in 256 MiB of host memory" in text(swapping)
    result = fit(config.with_values(swap_space=1e5), memory=GIB)
    assert not result.fits and "--swap-space 100000" in str(result.problem)


def test_the_defaults_that_bind(bare: str) -> None:
    config = EngineConfig(model=bare, device="reference", max_num_seqs=64)
    assert "half of what is free" in str(fit(config, memory=4 << 20).limit)
    huge = tiny(Path(bare).parent / "huge", num_hidden_layers=512, max_position_embeddings=10**6,
                vocab_size=321)  # fmt: skip
    config = EngineConfig(model=str(huge), device="reference", max_num_seqs=64)
    assert "4 GiB" in str(fit(config, memory=100 * GIB, typical_len=10**6).limit)


def test_what_does_not_fit(bare: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model=bare, device="reference")
    result = fit(config, memory=300_000)
    assert not result.fits and "the weights take" in str(result.problem)
    assert any("--dtype bfloat16" in advice for advice in result.advice)
    result = fit(config.with_values(kv_memory=GIB), memory=GIB)
    assert not result.fits and "exceed" in str(result.problem)
    result = fit(config.with_values(num_kv_blocks=10**7), memory=GIB)
    assert not result.fits and "lower --num-kv-blocks" in str(result.problem)
    result = fit(config.with_values(max_model_len=512, num_kv_blocks=4), memory=GIB)
    assert not result.fits and "--max-model-len 512 needs" in str(result.problem)
    with pytest.raises(SystemExit) as caught:
        main(["plan", bare, "--device", "reference", "--memory", "300K", "--json"])
    assert caught.value.code == 2
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="missing"):
        fit(EngineConfig(model=str(tiny(tmp_path / "m")), device="reference"))


def test_the_text(bare: str) -> None:
    shown = text(fit(EngineConfig(model=bare, device="reference"), memory=GIB))
    for words in ("1.0 GiB free", "weights", "a token", "max_model_len", "fits      yes"):
        assert words in shown
    assert asdict(fit(EngineConfig(model=bare), memory=GIB))["fits"] is True
    assert size_text(1536) == "1.5 KiB" and size_text(5 << 40) == "5.0 TiB"
    assert count_text(134515008) == "135 M" and count_text(12) == "12"


def test_a_hub_models_weights_are_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot(model: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        folder = tiny(tmp_path / "hub")
        (folder / "x.safetensors").unlink()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    result = fit(EngineConfig(model="org/name", device="reference"), memory=GIB)
    assert isinstance(result, Fit) and asked == [["*.json"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--typical-len", "0"), "at least 1"), (("--memory", "x"), "not a size"),
     (("no-such-model",), "no-such-model")],
)  # fmt: skip
def test_mistakes(arguments: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    assert caught.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "size"), [([], 96576768), (["--no-keep-codes"], 538060032)])
def test_no_weight_is_read(flags: list[str], size: int) -> None:
    code = (
        "from octavo.core.loading.gguf_weights import GgufWeights\n"
        "def get(self, name, *form): raise AssertionError(name)\n"
        "GgufWeights.get = GgufWeights.codes = get\n"
        f"from octavo.core.entry.cli.main import main; main(['plan', '--json', *{flags}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weight_bytes"] == size
