"""One program on several of PJRT's CPU devices, in a process that has so many: the whole engine, and one layer's parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
from xla_requests import TIGHT, requests, tokens

SWAP = {"swap_space": 0.0625, "preemption_mode": "swap"}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "heads that divide": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 4}, {}),
    "one KV head, a window, bfloat16 cache": (
        "Mistral",
        {"num_key_value_heads": 1, "sliding_window": 11},
        {"kv_cache_dtype": "bfloat16"},
    ),
}
"""Kind, changes of its configuration, options of the engine."""

ENGINE = """
import json, sys
import tiny_models as tiny
from xla_requests import requests, tokens
from octavo.backends.xla import bridge

folder, chips, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
engine = tiny.engine(folder, device=f"xla:cpu:x{chips}", **options)
runner = engine._runner
cut = {name: bridge.cut_as(w) for name, w in runner._weights.items()}
caches = [bridge.cut_as(kv.data) for kv in runner.kv]
warm, built = bridge.compilations(), runner.compilations
found = [tiny.run(engine, *requests()) for _ in range(2)]  # the second time with prefixes in the cache
again = bridge.compilations() - warm
assert [bridge.cut_as(kv.data) for kv in runner.kv] == caches
print(json.dumps({
    "chips": bridge.chips(), "built": built, "compiled later": again + runner.compilations - built,
    "swaps": engine.stats().swaps, "weights": cut, "caches": caches, "on the host": bridge.fallbacks(),
    "tokens": [[[*key, t] for key, t in tokens(f).items()] for f in found],
}))
"""

PARTS = """
import numpy as np
import torch
from octavo.backends.xla import backend, bridge
from octavo.core.types import Batch
from octavo.plugins import KVSpec, Limits, WeightSpec

made = backend.XlaBackend()
device = "xla:cpu:x4"
made.start(device, Limits(max_num_seqs=8, max_model_len=256))
ops = made.ops(device)
torch.manual_seed(0)
parts = {n: torch.randn(rows, 48) / 7 for n, rows in (("q", 64), ("k", 32), ("v", 32))}
specs = [
    WeightSpec("qkv", "linear", tuple((n, tuple(p.shape)) for n, p in parts.items()), shard_axis=0),
    WeightSpec("out", "linear", (("o", (48, 64)),), shard_axis=1),
    WeightSpec("odd", "linear", (("d", (7, 48)),), shard_axis=0),
]
parts |= {"o": torch.randn(48, 64) / 8, "d": torch.randn(7, 48)}
weights = {s.name: ops.pack_weight({n: parts[n] for n, _ in s.parts}, s, "float32") for s in specs}
assert bridge.cut_as(weights["qkv"]) == "{devices=[4,1]0,1,2,3}", bridge.cut_as(weights["qkv"])
assert bridge.cut_as(weights["out"]) == "{devices=[1,4]0,1,2,3}", bridge.cut_as(weights["out"])
assert bridge.cut_as(weights["odd"]) == "{replicated}", bridge.cut_as(weights["odd"])

cache = ops.alloc_kv([KVSpec((0,), 4, 8, 8)], 6, 16)
assert bridge.cut_as(cache[0].data).startswith("{devices=[1,4,1,1]"), bridge.cut_as(cache[0].data)
tokens = 20
batch = Batch(
    num_tokens=tokens, num_seqs=1, token_ids=np.zeros(tokens, np.int32),
    positions=np.arange(tokens), query_start=np.array([0, tokens], np.int32),
    context_lens=np.array([tokens], np.int32), logits_rows=np.array([tokens - 1], np.int32),
    slots=(np.arange(tokens) + 16,), block_tables=(np.array([[1, 2]], np.int32),),
)
meta = made.prepare(batch, None, device)
x = torch.randn(tokens, 48)
heads = ops.linear(bridge.upload(x), weights["qkv"]).view(tokens, 16, 8)
after = ops.write_kv(cache[0], heads[:, 8:12], heads[:, 12:], meta)
mixed = ops.paged_attention(heads[:, :8], after, meta, scale=8**-0.5)
y = ops.linear(mixed.flatten(1), weights["out"])
got = y.cpu()

def exact():
    q, k, v = (x.double() @ parts[n].double().T for n in "qkv")
    q, k, v = q.view(tokens, 8, 8), k.view(tokens, 4, 8), v.view(tokens, 4, 8)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    s = torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5
    s = s.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v).flatten(1) @ parts["o"].double().T

torch.testing.assert_close(got.double(), exact(), rtol=1e-4, atol=1e-4)
print("sharded", len(got), "rows")
"""


pytestmark = pytest.mark.timeout(900)


def alone(script: str, *words: str) -> str:
    """What a script prints in a process of its own: one has one number of devices."""
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chips", [2, 4])
def test_the_engine_over_several_devices(model: str, chips: int, tmp_path: Path) -> None:
    """The tokens of one device, from programs that were all compiled at the start."""
    kind, changes, more = MODELS[model]
    tiny.make(kind, changes).save_pretrained(tmp_path)
    options = {**TIGHT, **SWAP, **more}
    wanted = tokens(tiny.run(tiny.engine(tmp_path, device="xla:cpu", **options), *requests()))
    printed = alone(ENGINE, str(tmp_path), str(chips), json.dumps(options))
    found = json.loads(printed.splitlines()[-1])
    assert found["chips"] == chips
    for run in found["tokens"]:
        assert {(name, index): drawn for name, index, drawn in run} == wanted
    assert found["built"] > 0
    assert found["compiled later"] == 0, "a step compiled"
    assert found["swaps"] > 0, "no block went over the host"
    assert not found["on the host"]
    cut = f"{{devices=[{chips},1]"
    assert found["weights"]["model.layers.0.self_attn.o_proj.weight"].startswith(cut)
    by_heads = f"{{devices=[1,{chips},1,1]"
    heads = changes["num_key_value_heads"]
    expected = "{replicated}" if heads % chips else by_heads
    assert all(cache.startswith(expected) for cache in found["caches"]), found["caches"]


def test_attention_between_two_products_over_four_devices() -> None:
    assert "sharded 20 rows" in alone(PARTS)
