"""A checkpoint's own codes: taken over from GGUF to the last bit, and multiplied as float32 numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf_models import original_weights, write_gguf

from octavo.core.contract import WeightSpec
from octavo.core.loading.gguf_codes import GROUP, kept_codes
from octavo.core.loading.gguf_codes import KEPT as KINDS
from octavo.core.loading.gguf_dequant import dequantize
from octavo.core.loading.gguf_weights import GgufWeights
from octavo.core.quantization import KEPT, form, place
from octavo.core.quantization.base import QuantizedTensor
from octavo.core.quantization.kept import Kept


def raw_blocks(kind: int, rows: int, columns: int) -> torch.Tensor:
    """Random blocks of a ggml type, each with finite numbers behind its scale and minimum."""
    block, width = GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    dice = np.random.default_rng(4)
    raw = dice.integers(0, 256, (rows, columns // block, width), np.uint8)
    for at in (0, 2) if kind == gguf.GGMLQuantizationType.Q4_1 else (0,):
        halves = dice.standard_normal((rows, columns // block, 1)).astype(np.float16)
        raw[..., at : at + 2] = halves.view(np.uint8)
    return torch.from_numpy(raw.reshape(-1))


def codes(name: str, n: int = 40, k: int = 96) -> QuantizedTensor:
    kind = next(kind for kind, mine in KINDS.items() if mine == name)
    found = kept_codes(raw_blocks(kind, n, k), kind, (n, k))
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_codes_stand_for_what_unpacking_gives(kind: int) -> None:
    raw = raw_blocks(kind, 60, 256)
    found = kept_codes(raw, kind, (60, 256))
    assert found is not None and (found.form, found.group) == (KINDS[kind], GROUP)
    assert torch.equal(form(found.form).dequantize(found), dequantize(raw, kind, (60, 256)))


def test_other_types_have_no_such_codes() -> None:
    for kind in gguf.GGMLQuantizationType:
        if kind.name[:3] in ("Q4_", "Q5_", "Q6_", "Q8_", "Q2_", "Q3_") and int(kind) not in KINDS:
            raw = torch.zeros(8 * GGML_QUANT_SIZES[kind][1], dtype=torch.uint8)
            assert kept_codes(raw, int(kind), (8, GGML_QUANT_SIZES[kind][0])) is None
    assert kept_codes(raw_blocks(8, 1, 32), 8, (32,)) is None


@pytest.mark.parametrize("name", KEPT)
def test_products_are_with_the_activations_as_they_are(name: str) -> None:
    weight, x = codes(name), torch.randn(7, 96)
    want = x.double() @ form(name).dequantize(weight).double().T
    torch.testing.assert_close(form(name).linear(x, weight).double(), want, rtol=1e-6, atol=1e-5)
    assert form(name).linear(x.bfloat16(), weight).dtype == torch.bfloat16
    assert form(name).linear(x[:0], weight).shape == (0, 40)


@pytest.mark.parametrize("name", KEPT)
def test_nothing_is_quantised_to_them(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} holds what a checkpoint has in codes"):
        form(name).quantize(torch.randn(8, 64), 32)


@pytest.mark.parametrize("name", KEPT)
def test_sizes(name: str) -> None:
    kind, weight = form(name), codes(name)
    stored = weight.codes.numel() * kind.bits // 8 + weight.scales.nbytes
    stored += 0 if weight.minima is None else weight.minima.nbytes
    assert kind.nbytes(weight.shape, GROUP) == stored
    assert kind.holds((7, 96), 32)
    assert not kind.holds((7, 48), 32) and not kind.holds((7,), 32) and not kind.holds((7, 96), 0)


def spec(
    role: Literal["linear", "head", "embedding", "norm"], *parts: str, alias: str | None = None
) -> WeightSpec:
    shapes = tuple((part, (8, 64)) for part in parts)
    return WeightSpec("+".join((*parts, role)), role, shapes, alias=alias)


def test_a_weight_is_kept_where_all_its_parts_are_of_one_form() -> None:
    scheme = Kept({"q": "codes4", "k": "codes4", "v": "codes8", "e": "codes8", "n": "codes8"})
    specs = [
        spec("linear", "q", "k"),
        spec("linear", "q", "v"),
        spec("linear", "q", "plain"),
        spec("embedding", "e"),
        spec("head", "e", alias="e+embedding"),
        spec("norm", "n"),
    ]
    placed = place(specs, scheme, ("codes8", "codes4"))
    assert [s.scheme for s in placed.specs] == ["codes4", None, None, "codes8", "codes8", None]
    assert {s.group for s in placed.specs if s.scheme} == {GROUP}
    less = place(specs, scheme, ("codes4",))
    assert [s.scheme for s in less.specs] == ["codes4", None, None, None, None, None]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_file_says_which_of_its_tensors_are_in_codes(family: str, tmp_path: Path) -> None:
    """And gives them in the original model's rows."""
    kinds = gguf.GGMLQuantizationType
    original = original_weights(family)
    write_gguf(
        tmp_path / "m.gguf", family, original, kinds.Q4_1, {"embed": kinds.Q8_0, "down": kinds.F32}
    )
    source = GgufWeights(tmp_path / "m.gguf")
    matrices = {name for name, value in original.items() if value.ndim == 2}
    forms = source.forms()
    assert set(forms) == {name for name in matrices if "down" not in name}
    assert {name for name, mine in forms.items() if mine == "codes8"} == {
        "model.embed_tokens.weight"
    }
    for name, mine in forms.items():
        found = source.codes(name, mine, GROUP)
        assert found is not None
        assert torch.equal(form(mine).dequantize(found), source.get(name)), name
    assert source.codes("model.norm.weight", "codes8", GROUP) is None
    source.close()
