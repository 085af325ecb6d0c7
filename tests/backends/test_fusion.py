"""A larger op stands for the smaller ones: the same bits, and off when somebody replaces one of them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from tiny_models import make, prompt_of

from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.cpu.ops import CpuOps
from octavo.core.config import EngineConfig
from octavo.core.contract import fusion_stands
from octavo.core.entry.wiring import build_engine
from octavo.core.params import SamplingParams
from octavo.core.types import Request
from octavo.plugins import LayerSpec, Ops

calls: list[str] = []


class Fused(CpuOps):
    def decoder_layer(self, x: torch.Tensor, spec: LayerSpec, ctx: Any) -> torch.Tensor:
        calls.append("decoder_layer")
        return super().decoder_layer(x, spec, ctx)


class Single(CpuOps):
    """Replaces an op that the fused layer covers, so that every op is called by itself."""

    def act_and_mul(
        self, x: torch.Tensor, kind: Literal["silu", "gelu", "gelu_tanh"]
    ) -> torch.Tensor:
        calls.append("act_and_mul")
        return super().act_and_mul(x, kind)


class Reclaimed(Single):
    fusions: ClassVar = CpuOps.fusions


def bits(folder: Path, ops: type[Ops], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    monkeypatch.setattr(CpuBackend, "ops", lambda self, device: ops())
    calls.clear()
    config = {"device": "cpu", "num_kv_blocks": 40, "max_num_batched_tokens": 24} | options
    engine = build_engine(EngineConfig(model=str(folder), **config))
    for i, length in enumerate((40, 1, 17)):
        params = SamplingParams(
            temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1 if i == 2 else None
        )
        engine.add(Request(id=str(i), prompt_token_ids=prompt_of(length, i), params=params))
    found: dict[str, list[tuple[int, str]]] = {}
    while engine.has_unfinished():
        for update in engine.step():
            for entry in (*(update.logprobs or ()), *(update.prompt_logprobs or ())):
                found.setdefault(update.request_id, []).append(
                    (entry.token_id, entry.logprob.hex())
                )
    engine.shutdown()
    assert sum(map(len, found.values())) == 18 + 16
    return found


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "gelu": ("Llama", {"hidden_act": "gelu"}),
    "gelu_tanh, tied": ("Llama", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
    "head size of its own": ("Llama", {"head_dim": 24}),
    "one kv head": ("Llama", {"num_key_value_heads": 1}),
    "window": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
}


NUMBERS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8, KV float32": {"quantization": "int8", "kv_cache_dtype": "float32"},
    "float32, KV int8": {"dtype": "float32", "kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_fused_layer_gives_the_same_bits(
    variant: str, numbers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(*VARIANTS[variant]).save_pretrained(tmp_path)
    single = bits(tmp_path, Single, monkeypatch, **NUMBERS[numbers])
    assert set(calls) == {"act_and_mul"}
    fused = bits(tmp_path, Fused, monkeypatch, **NUMBERS[numbers])
    assert set(calls) == {"decoder_layer"}
    assert fused == single
    assert bits(tmp_path, CpuOps, monkeypatch, **NUMBERS[numbers]) == single


def test_a_closed_engine_lets_cache_and_weights_go(tmp_path: Path) -> None:
    """Though its ops live on: what a layer was bound to must not hold them."""
    make("Llama", {}).save_pretrained(tmp_path)
    engine = build_engine(EngineConfig(model=str(tmp_path), device="cpu", num_kv_blocks=40))
    engine.add(Request(id="a", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=2)))
    while engine.has_unfinished():
        engine.step()
    runner: Any = engine._runner
    assert runner._kv[0].bound, "no layer ran fused"
    held = [weakref.ref(runner._kv[0].k), weakref.ref(next(iter(runner._weights.values())).buffer)]
    engine.shutdown()
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_what_switches_a_fusion_off() -> None:
    class Unrelated(CpuOps):
        def embedding(self, ids: torch.Tensor, weight: Any) -> torch.Tensor:
            return super().embedding(ids, weight)

    class Below(Single):
        pass

    assert fusion_stands(CpuOps, "decoder_layer")
    assert fusion_stands(Unrelated, "decoder_layer")
    assert not fusion_stands(Single, "decoder_layer")
    assert not fusion_stands(Below, "decoder_layer")
    assert fusion_stands(Reclaimed, "decoder_layer")
    assert not fusion_stands(Ops, "decoder_layer")
    assert not fusion_stands(CpuOps, "unheard_of")
