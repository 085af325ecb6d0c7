"""Which weights a scheme takes, what devices and checkpoints say to it, and third-party schemes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import engine, greedy, make, prompt_of, run, tokens_of

from octavo.backends.reference.backend import ReferenceBackend
from octavo.core.config import ConfigError, EngineConfig
from octavo.core.contract import Capabilities, WeightSpec
from octavo.core.entry.fit import fit
from octavo.core.entry.numbers import choose_numbers
from octavo.core.loading.errors import ModelConfigError
from octavo.core.quantization import SCHEMES, form, place, scheme_class
from octavo.plugins.manager import plugins

HERE = Path(__file__).parent


def spec(name: str, role: Any, shape: tuple[int, ...], **more: Any) -> WeightSpec:
    return WeightSpec(name, role, ((name, shape),), **more)


def made(name: str) -> Any:
    found = scheme_class(name).from_weights()
    assert found is not None
    return found


def test_int4_takes_linear_layers_and_int8_the_head() -> None:
    specs = [
        spec("e", "embedding", (100, 64)),
        spec("l", "linear", (64, 96)),
        spec("odd", "linear", (64, 52)),
        spec("wide", "linear", (2, 65538)),
        spec("n", "norm", (64,)),
        spec("b", "bias", (64,)),
        spec("h", "head", (100, 64), alias="e"),
    ]
    placed = place(specs, made("int4"), ("int8", "int4"))
    assert [(s.name, s.scheme, s.group) for s in placed.specs] == [
        ("e", "int8", 0),
        ("l", "int4", 32),
        ("odd", "int8", 0),
        ("wide", None, 0),
        ("n", None, 0),
        ("b", None, 0),
        ("h", "int8", 0),
    ]
    assert len(placed.notes) == 2
    assert (
        "1 weights are int8, because int4 needs inputs in whole groups of 32: odd"
        in placed.notes[0]
    )
    assert "1 weights are float" in placed.notes[1] and placed.notes[1].endswith(": wide")
    eight = place(specs, made("int8"), ("int8",))
    assert [s.scheme for s in eight.specs] == ["int8", "int8", "int8", None, None, None, "int8"]
    assert place(specs, None, ("int8",)).specs == tuple(specs)


def test_a_device_with_one_form_gets_no_other() -> None:
    specs = [spec("l", "linear", (64, 52)), spec("h", "head", (100, 64))]
    placed = place(specs, made("int4"), ("int4",))
    assert [s.scheme for s in placed.specs] == [None, None]
    assert any("int8 needs a device that offers it" in note for note in placed.notes)


def numbers(offered: tuple[str, ...] = ("int8", "int4"), **options: Any) -> Any:
    stored = options.pop("stored", {})
    capabilities = Capabilities(
        dtypes=("float32", "bfloat16", "float16"),
        native_dtypes=("float32", "bfloat16"),
        kv_dtypes=options.pop("kv", ("float32", "float16", "bfloat16")),
        kv_equals_dtype=options.pop("equal", False),
        quantization=offered,
    )
    return choose_numbers(EngineConfig(**options), stored, capabilities, "chip", SCHEMES)


@pytest.mark.parametrize(
    ("options", "dtype", "kv_dtype"),
    [
        ({}, "float32", "float32"),
        ({"dtype": "float16"}, "float16", "float16"),
        ({"dtype": "bfloat16"}, "bfloat16", "float16"),
        ({"stored": {"dtype": "bfloat16"}}, "bfloat16", "float16"),
        ({"quantization": "int8"}, "float32", "float16"),
        ({"quantization": "int4", "kv_cache_dtype": "float32"}, "float32", "float32"),
        ({"quantization": "int8", "kv": ("float32",)}, "float32", "float32"),
        ({"dtype": "bfloat16", "kv": ("bfloat16",)}, "bfloat16", "bfloat16"),
        ({"dtype": "bfloat16", "equal": True}, "bfloat16", "bfloat16"),
        ({"quantization": "int8", "equal": True}, "float32", "float32"),
        ({"kv_cache_dtype": "float32", "equal": True}, "float32", "float32"),
    ],
)
def test_the_kv_cache_is_as_small_as_the_weights_justify(
    options: dict[str, Any], dtype: str, kv_dtype: str
) -> None:
    found = numbers(**options)
    assert (found.dtype, found.kv_dtype) == (dtype, kv_dtype)
    chosen = options.get("kv_cache_dtype", "auto") == "auto" and dtype != kv_dtype
    assert any("KV cache in float16" in note for note in found.notes) == chosen


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_a_device_without_float32_gets_what_it_has(stored: str) -> None:
    only = Capabilities(dtypes=("bfloat16",), native_dtypes=("bfloat16",), kv_dtypes=("bfloat16",))
    found = choose_numbers(EngineConfig(), {"dtype": stored}, only, "chip", SCHEMES)
    assert (found.dtype, found.kv_dtype) == ("bfloat16", "bfloat16")
    told = [f"dtype bfloat16: the checkpoint's {stored} is not native to chip"]
    assert list(found.notes) == (told if stored != "bfloat16" else [])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"quantization": "int5"}, ConfigError, r"'int5' is not known \(did you mean.*int4, int8"),
        ({"quantization": "int4", "offered": ("int8",)}, ConfigError, "int4 weights, which chip.*it has int8"),
        ({"quantization": "int8", "offered": ()}, ConfigError, "quantises nothing: leave it out"),
        ({"kv_cache_dtype": "float16", "equal": True}, ConfigError,
         "--kv-cache-dtype float16 beside float32 weights: .* one dtype; leave it out"),
        ({"stored": {"quantization_config": {"quant_method": "gptq"}}}, ModelConfigError, r"\(gptq\)"),
        ({"stored": {"quantization_config": {"quant_method": "int8"}}}, ModelConfigError, r"\(int8\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_said(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        numbers(**options)


@pytest.mark.parametrize("value", ["", 8, True])
def test_the_option_is_a_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="quantization must be the name of a scheme"):
        EngineConfig(quantization=value)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_shapes_that_fall_back_are_noted_and_run(device: str, scheme: str, tmp_path: Path) -> None:
    """52 inputs are no whole number of groups."""
    make("Llama", {}).save_pretrained(tmp_path)
    running = engine(tmp_path, device=device, quantization=scheme)
    noted = [note for note in running.info.notes if "weights are int8" in note]
    assert len(noted) == (scheme == "int4") and all("mlp.down_proj.weight" in n for n in noted)
    assert running.info.quantization == scheme and running.info.kv_dtype == "float16"
    assert len(tokens_of(run(running, greedy("r", prompt_of(20), 5))["r"])) == 5
    planned = fit(
        EngineConfig(model=str(tmp_path), device=device, quantization=scheme), memory=1 << 30
    )
    assert planned.weight_bytes == running.info.weight_bytes
    assert planned.quantization == scheme and set(noted) <= set(planned.notes)
    plain = fit(EngineConfig(model=str(tmp_path), device=device), memory=1 << 30)
    assert planned.weight_bytes < plain.weight_bytes / 2


# --------------------------------------------------------------------------- third-party schemes


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(
        type(plugins()),
        "quantization_schemes",
        lambda self: {"ternary": "schemes:Ternary", "words": "schemes:Words"},
    )


@pytest.mark.usefixtures("third_party")
def test_a_scheme_of_ones_own_runs_on_every_device(tmp_path: Path) -> None:
    make("Llama", {}).save_pretrained(tmp_path)
    found = []
    for device in ("cpu", "reference"):
        running = engine(tmp_path, device=device, quantization="ternary", kv_cache_dtype="float32")
        assert running.info.quantization == "ternary"
        found.append(tokens_of(run(running, greedy("r", prompt_of(20), 8))["r"]))
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match="ternary, words"):
        engine(tmp_path, quantization="int5")
    with pytest.raises(ConfigError, match="words is for checkpoints that were made with it"):
        engine(tmp_path, quantization="words")


def in_words(folder: Path, group: int, skipped: tuple[str, ...]) -> None:
    """Turns a checkpoint into a quantised one, and a copy of it beside into the numbers it holds."""
    state = load_file(folder / "model.safetensors")
    plain, packed = dict(state), {}
    for name, weight in state.items():
        if "_proj.weight" not in name or any(word in name for word in skipped):
            packed[name] = weight
            continue
        grid = weight.view(weight.shape[0], -1, group)
        scales = ((grid.amax(-1) - grid.amin(-1)) / 15).half()
        zeros = torch.round(-grid.amin(-1) / scales.float()).clamp(0, 15).to(torch.int32)
        codes = torch.round(grid / scales.float()[..., None] + zeros[..., None]).clamp(0, 15)
        codes = codes.flatten(1).to(torch.int64)
        shifts = torch.arange(0, 32, 4)
        words = (codes.view(codes.shape[0], -1, 8) << shifts).sum(-1)
        stem = name.removesuffix(".weight")
        packed[f"{stem}.qweight"] = words.to(torch.uint32).view(torch.int32)
        packed[f"{stem}.scales"], packed[f"{stem}.qzeros"] = scales, zeros
        values = (codes.view(grid.shape) - zeros[..., None]) * scales.float()[..., None]
        plain[name] = values.flatten(1)
    config = json.loads((folder / "config.json").read_text())
    beside = folder.parent / "plain"
    beside.mkdir()
    (beside / "config.json").write_text(json.dumps(config))
    save_file(plain, beside / "model.safetensors")
    config["quantization_config"] = {
        "quant_method": "words", "bits": 4, "group_size": group, "skipped": skipped,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(packed, folder / "model.safetensors")


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_quantised_checkpoint_is_read_into_the_canonical_form(
    device: str, tmp_path: Path
) -> None:
    folder = tmp_path / "words"
    make("Llama", {"hidden_size": 64, "intermediate_size": 128}).save_pretrained(folder)
    in_words(folder, 64, ("layers.1.",))
    running = engine(folder, device=device, kv_cache_dtype="float32")
    assert running.info.quantization == "words"
    prompt = prompt_of(30)
    tokens = tokens_of(run(running, greedy("r", prompt, 10))["r"])
    plain = engine(tmp_path / "plain", device=device)
    assert tokens == tokens_of(run(plain, greedy("r", prompt, 10))["r"])
    assert running.info.weight_bytes < plain.info.weight_bytes * 0.6
    with pytest.raises(ConfigError, match=r"int8 cannot be had from a checkpoint.*words"):
        engine(folder, device=device, quantization="int8")


@pytest.mark.usefixtures("third_party")
def test_without_the_form_a_quantised_checkpoint_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "words"
    make("Llama", {"hidden_size": 64, "intermediate_size": 128}).save_pretrained(folder)
    in_words(folder, 64, ())
    offered = ReferenceBackend().capabilities("reference")
    monkeypatch.setattr(
        ReferenceBackend,
        "capabilities",
        lambda self, device: replace(offered, quantization=("int8",)),
    )
    running = engine(folder, kv_cache_dtype="float32")
    assert any("no int4 weights, so they are unpacked" in note for note in running.info.notes)
    prompt = prompt_of(30)
    plain = engine(tmp_path / "plain")
    wanted = tokens_of(run(plain, greedy("r", prompt, 10))["r"])
    assert tokens_of(run(running, greedy("r", prompt, 10))["r"]) == wanted


def test_forms_are_known_by_name() -> None:
    assert form("int4") is form("int4") and form("int4").bits == 4
