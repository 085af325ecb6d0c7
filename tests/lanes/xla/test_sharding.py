"""Annotated tensor parallelism on four of PJRT's CPU devices, in a process that has four."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import torch
from octavo.backends.xla import backend, bridge, sharding
from octavo.backends.xla.ops import XlaOps
from octavo.core.types import Batch
from octavo.backends.xla.cache import KV
from octavo.plugins import WeightSpec
import numpy as np

mesh = bridge.mesh(4)
bridge.start("CPU")
ops = XlaOps("CPU")
torch.manual_seed(0)
parts = {n: torch.randn(rows, 48) / 7 for n, rows in (("q", 64), ("k", 32), ("v", 32))}
specs = [
    WeightSpec("qkv", "linear", tuple((n, tuple(p.shape)) for n, p in parts.items()), shard_axis=0),
    WeightSpec("out", "linear", (("o", (48, 64)),), shard_axis=1),
    WeightSpec("odd", "linear", (("d", (7, 48)),), shard_axis=0),
]
more = {"o": torch.randn(48, 64) / 8, "d": torch.randn(7, 48)}
weights = {s.name: ops.pack_weight({n: (parts | more)[n] for n, _ in s.parts}, s, "float32") for s in specs}
sharding.shard_weights(weights, specs, 4, mesh)
assert bridge.cut_as(weights["qkv"]) == "{devices=[4,1]0,1,2,3}", bridge.cut_as(weights["qkv"])
assert bridge.cut_as(weights["out"]) == "{devices=[1,4]0,1,2,3}", bridge.cut_as(weights["out"])
assert bridge.cut_as(weights["odd"]) == "{replicated}", bridge.cut_as(weights["odd"])

cache = [KV(bridge.upload(torch.zeros(6, 8, 16, 8)), kv_heads=4, value_size=8)]
sharding.shard_cache(cache, 4, mesh)
assert bridge.cut_as(cache[0].data).startswith("{devices=[1,4,1,1]"), bridge.cut_as(cache[0].data)
tokens = 20
batch = Batch(
    num_tokens=tokens, num_seqs=1, token_ids=np.zeros(tokens, np.int32),
    positions=np.arange(tokens), query_start=np.array([0, tokens], np.int32),
    context_lens=np.array([tokens], np.int32), logits_rows=np.array([tokens - 1], np.int32),
    slots=(np.arange(tokens) + 16,), block_tables=(np.array([[1, 2]], np.int32),),
)
meta = backend.XlaBackend().prepare(batch, None, "xla:cpu")
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
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v).flatten(1) @ more["o"].double().T

torch.testing.assert_close(got.double(), exact(), rtol=1e-4, atol=1e-4)
print("sharded", len(got), "rows")
"""


def test_attention_between_two_products_over_four_devices() -> None:
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sharded 20 rows" in done.stdout
