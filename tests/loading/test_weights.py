"""Safetensors folders, their faults, and the check of names and shapes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.core.loading.errors import CorruptFileError, ModelConfigError, ModelError, WeightsError
from octavo.core.loading.files import ModelFiles
from octavo.core.loading.hf_config import eos_token_ids, load_config, load_generation_config
from octavo.core.loading.weights import TensorInfo, check_names, open_weights, read_header


def _files(folder: Path) -> ModelFiles:
    return ModelFiles("m", "folder", folder, str(folder))


def test_single_file(tmp_path: Path) -> None:
    a, b = torch.randn(3, 4), torch.arange(6, dtype=torch.int32)
    save_file({"a": a, "b": b, "c": a.to(torch.bfloat16)}, tmp_path / "model.safetensors")
    source = open_weights(_files(tmp_path))
    assert source.names() == {
        "a": TensorInfo((3, 4), torch.float32),
        "b": TensorInfo((6,), torch.int32),
        "c": TensorInfo((3, 4), torch.bfloat16),
    }
    assert torch.equal(source.get("a"), a) and torch.equal(source.get("b"), b)
    with pytest.raises(WeightsError, match="no tensor 'bb'"):
        source.get("bb")
    source.close()


def test_progress_counts_what_was_read(tmp_path: Path) -> None:
    seen: list[int] = []

    class Seen:
        def task(self, description: str, total: int | None) -> Seen:
            seen.append(total or 0)
            return self

        def advance(self, n: int) -> None:
            seen.append(-n)

        def close(self) -> None:
            seen.append(0)

    save_file({"a": torch.ones(4), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    source = open_weights(_files(tmp_path), Seen())
    for name in source.names():
        source.get(name)
    source.close()
    assert seen[0] == 24 == -sum(seen[1:]) and seen[-1] == 0


def _sharded(folder: Path) -> dict[str, str]:
    weight_map = {"x.weight": "model-1.safetensors", "y.weight": "model-2.safetensors"}
    for name, shard in weight_map.items():
        save_file({name: torch.ones(2)}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"stray": torch.ones(1)}, folder / "consolidated.safetensors")  # not in the index
    return weight_map


def test_shards(tmp_path: Path) -> None:
    weight_map = _sharded(tmp_path)
    source = open_weights(_files(tmp_path))
    assert set(source.names()) == set(weight_map)
    assert source.get("y.weight").tolist() == [1, 1]


def test_missing_shard_is_named(tmp_path: Path) -> None:
    _sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"1 of 2 shards .* missing: model-2\.safetensors"):
        open_weights(_files(tmp_path))


def test_tensor_in_two_files(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"x": torch.ones(2)}, tmp_path / "b.safetensors")
    with pytest.raises(WeightsError, match=r"both a\.safetensors and b\.safetensors"):
        open_weights(_files(tmp_path))


def test_truncated_and_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"first": torch.ones(8), "second": torch.ones(8)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(CorruptFileError, match=r"model\.safetensors is truncated: tensor 'second'"):
        open_weights(_files(tmp_path))
    for content in (b"", whole[:5], whole[:20], struct.pack("<Q", 9) + b"{not json"):
        path.write_bytes(content)
        with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
            open_weights(_files(tmp_path))
    header = json.dumps({"x": {"dtype": "F4", "shape": [1], "data_offsets": [0, 0]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(WeightsError, match="'x' has dtype F4"):
        read_header(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
def test_pickles_are_never_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(WeightsError, match=r"never unpickled here\. Convert them"):
        open_weights(_files(tmp_path))
    (tmp_path / name).unlink()
    with pytest.raises(WeightsError, match=r"no \.safetensors file"):
        open_weights(_files(tmp_path))


def test_check_names_lists_everything_at_once() -> None:
    f32 = torch.float32
    found = {
        "model.norm.weight": TensorInfo((4,), f32),
        "model.layers.0.self_attn.q_proj.weights": TensorInfo((4, 4), f32),
        "rotary.inv_freq": TensorInfo((2,), f32),
    }
    expected = {
        "model.norm.weight": (8,),
        "model.layers.0.self_attn.q_proj.weight": (4, 4),
    }
    with pytest.raises(ModelError) as error:
        check_names(expected, found, ignore=["rotary.inv_freq"])
    text = str(error.value)
    assert "1 missing: model.layers.0.self_attn.q_proj.weight (nearest: model.layers.0" in text
    assert "1 unexpected: model.layers.0.self_attn.q_proj.weights" in text
    assert "model.norm.weight is [4], the model needs [8]" in text
    assert "rotary" not in text
    check_names({"model.norm.weight": (4,)}, found, ignore=found)
    many = {f"w{i}": (1,) for i in range(20)}
    with pytest.raises(ModelError, match=r"20 missing: .* and 12 more"):
        check_names(many, {})


def test_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": [2, 7]}')
    files = _files(tmp_path)
    assert load_config(files)["model_type"] == "llama"
    assert load_generation_config(files) == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    generation = load_generation_config(files)
    assert eos_token_ids(load_config(files), generation, 2) == (9, 2, 7)
    assert eos_token_ids({}, {}, None) == ()
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError):
        load_config(files)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptFileError, match="not valid JSON"):
        load_config(files)
