"""The contract's defaults: a backend that overrides nothing already works, by the portable bodies."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core import ops as portable
from octavo.core.contract import (
    API_VERSION,
    Backend,
    Capabilities,
    ExecutionPlan,
    KVSpec,
    Lane,
    Limits,
    MemoryInfo,
    ModelShape,
    Ops,
    Program,
    StepOut,
    WeightSpec,
)
from octavo.core.types import Batch

LIMITS = Limits(max_num_seqs=4, max_model_len=100)
SPEC = KVSpec((0, 1), kv_heads=2, head_size=6, head_size_v=4)
SHAPE = ModelShape("M", 2, 8, 4, 2, 6, 10, 100, 1, (SPEC,))


def batch(
    tokens: list[list[int]], starts: list[int], tables: list[list[int]], size: int, pad: int = 0
) -> Batch:
    """A batch by hand: sequence i's tokens stand at positions from starts[i] on."""
    counts = [len(t) for t in tokens]
    positions = [p for s, n in zip(starts, counts, strict=True) for p in range(s, s + n)]
    owner = [i for i, n in enumerate(counts) for _ in range(n)]
    slots = [tables[i][p // size] * size + p % size for i, p in zip(owner, positions, strict=True)]
    width = max(map(len, tables))
    ends = np.cumsum([0, *counts])
    return Batch(
        num_tokens=len(owner),
        num_seqs=len(tokens),
        token_ids=np.array([t for row in tokens for t in row] + [0] * pad, np.int32),
        positions=np.array(positions + [0] * pad, np.int64),
        query_start=np.array([*ends, *[ends[-1]] * bool(pad)], np.int32),
        context_lens=np.array(
            [s + n for s, n in zip(starts, counts, strict=True)] + [0] * bool(pad), np.int32
        ),
        logits_rows=np.array(ends[1:] - 1, np.int32),
        slots=(np.array(slots + [-1] * pad, np.int64),),
        block_tables=(
            np.array([t + [0] * (width - len(t)) for t in tables + [[]] * bool(pad)], np.int32),
        ),
    )


# ----------------------------------------------------------------------------------- backend


def test_a_backend_with_nothing_but_a_name_has_every_answer() -> None:
    class Bare(Backend):
        name = "bare"

    made = Bare()
    assert made.api_version == API_VERSION == (1, 3)
    assert "does not implement probe" in made.probe().reason and not made.probe().devices
    assert made.capabilities("bare") == Capabilities()
    assert made.torch_device("bare") == "cpu" and made.torch_device("bare:cuda:1") == "cuda:1"
    memory = made.memory("bare")
    assert isinstance(memory, MemoryInfo) and 0 < memory.free <= memory.total
    function = lambda: None  # noqa: E731
    plan = made.plan(SHAPE, "bare", LIMITS)
    assert made.compile(Program("forward", function), plan, "bare") is function
    assert made.communicator(None).size == 1


def test_the_default_plan_is_pure_and_follows_the_limits() -> None:
    made = Backend()
    plan = made.plan(SHAPE, "x", LIMITS)
    assert plan == made.plan(SHAPE, "x", LIMITS)
    assert plan.block_size == 16 and plan.lanes == (Lane(max_seqs=4, max_tokens=512),)
    asked = dataclasses.replace(
        LIMITS, block_size=32, max_num_batched_tokens=7, dtype="bfloat16", max_num_seqs=900
    )
    plan = made.plan(SHAPE, "x", asked)
    assert (plan.block_size, plan.lanes[0].max_tokens, plan.dtype) == (32, 7, "bfloat16")
    assert plan.max_logits_rows > 900
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.block_size = 8  # type: ignore[misc]


def test_head_sizes() -> None:
    c = Capabilities(head_sizes=(16, 256, 8))
    assert [c.refuses_head_size(n) for n in (8, 16, 20, 24, 256, 264)] == [
        True, False, True, False, False, True,
    ]  # fmt: skip


def test_weight_spec_stacks_its_parts() -> None:
    spec = WeightSpec("qkv", "linear", (("q", (8, 5)), ("k", (2, 5)), ("v", (2, 5))))
    assert spec.shape == (12, 5)
    parts = {name: torch.randn(*shape) for name, shape in spec.parts}
    packed = Ops().pack_weight(dict(reversed(parts.items())), spec, "float32")
    assert torch.equal(packed, torch.cat([parts["q"], parts["k"], parts["v"]]))


def test_a_packed_weight_is_a_copy() -> None:
    part = torch.ones(3, 2)
    packed = Ops().pack_weight({"w": part}, WeightSpec("w", "linear", (("w", (3, 2)),)), "float32")
    part.zero_()
    assert packed.sum() == 6


def test_prepare_takes_tokens_from_the_step_before() -> None:
    made = dataclasses.replace(
        batch([[5, 6, 7]], [0], [[1]], 4), token_src=np.array([-1, 1, 0], np.int32)
    )
    prev = StepOut(logits=None, tokens=torch.tensor([40, 41]))
    assert Backend().prepare(made, prev, "x").token_ids.tolist() == [5, 41, 40]
    assert Backend().prepare(made, None, "x").token_ids.tolist() == [5, 6, 7]


# ---------------------------------------------------------------------------------- KV cache


@pytest.fixture
def handles() -> list[Any]:
    torch.manual_seed(0)
    made = Ops().alloc_kv([SPEC], 7, 4)
    for pair in made:
        for cache in pair:
            cache.normal_()
    return made


def clone(handles: list[Any]) -> list[Any]:
    return [tuple(cache.clone() for cache in pair) for pair in handles]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


def test_one_handle_per_layer_in_layer_order() -> None:
    groups = [KVSpec((1, 3), 1, 4, 4), KVSpec((0, 2), 2, 8, 6, "bfloat16")]
    made = Ops().alloc_kv(groups, 5, 16)
    assert [tuple(k.shape[2:]) for k, _ in made] == [(2, 8), (1, 4), (2, 8), (1, 4)]
    assert [v.dtype for _, v in made][:2] == [torch.bfloat16, torch.float32]
    for spec in groups:
        layer = made[spec.layers[0]]
        held = sum(cache[0].numel() * cache.element_size() for cache in layer)
        assert Ops().kv_block_bytes(spec, 16) == held


def test_write_kv_skips_padding(handles: list[Any]) -> None:
    before = clone(handles)
    inputs = Backend().prepare(batch([[1, 2, 3]], [3], [[5, 2]], 4, pad=2), None, "x")
    k, v = torch.randn(5, 2, 6), torch.randn(5, 2, 4)
    after = Ops().write_kv(handles[0], k, v, inputs)
    for cache, old, new in zip(after, before[0], (k, v), strict=True):
        old[5, 3], old[2, 0], old[2, 1] = new[0], new[1], new[2]
        assert torch.equal(cache, old)


def test_copies_run_in_order(handles: list[Any]) -> None:
    """A block may be copied away and then be the target of a later copy in the same step."""
    before = clone(handles)
    after = Ops().copy_blocks(handles, [(1, 2), (3, 1), (2, 4)])
    for pair, old in zip(after, before, strict=True):
        for cache, was in zip(pair, old, strict=True):
            assert torch.equal(cache[2], was[1]) and torch.equal(cache[1], was[3])
            assert torch.equal(cache[4], was[1]) and torch.equal(cache[3], was[3])


def test_blocks_survive_the_trip_to_the_host(handles: list[Any]) -> None:
    before = clone(handles)
    exported = Ops().export_blocks(handles, [5, 1, 3])
    per_block = sum(Ops().kv_block_bytes(SPEC, 4) for _ in SPEC.layers)
    assert exported.shape == (3, per_block) and exported.dtype == torch.uint8
    for pair in handles:
        for cache in pair:
            cache.zero_()
    after = Ops().import_blocks(exported, handles, [2, 6, 4])
    for pair, old in zip(after, before, strict=True):
        for cache, was in zip(pair, old, strict=True):
            assert torch.equal(cache[[2, 6, 4]], was[[5, 1, 3]]) and not cache[[0, 1, 3, 5]].any()
    assert same(
        Ops().import_blocks(Ops().export_blocks(before, range(7)), clone(before), range(7)), before
    )


# --------------------------------------------------------------------------------- attention


def naive(q, k, v, scale: float, window: int, softcap: float, sink: float | None) -> list[float]:
    """One query against the keys up to its own position, in plain Python floats."""
    first = max(0, len(k) - window) if window else 0
    scores = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in k[first:]]
    if softcap:
        scores = [softcap * math.tanh(s / softcap) for s in scores]
    top = max([*scores, *([sink] if sink is not None else [])])
    weights = [math.exp(s - top) for s in scores]
    total = sum(weights) + (math.exp(sink - top) if sink is not None else 0.0)
    return [
        sum(w * value[d] for w, value in zip(weights, v[first:], strict=True)) / total
        for d in range(len(v[0]))
    ]


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [
        (0, 0.0, False),
        (3, 0.0, False),
        (1, 0.0, False),
        (0, 2.0, False),
        (0, 0.0, True),
        (5, 1.5, True),
    ],
)
def test_paged_attention_is_attention(
    handles: list[Any], window: int, softcap: float, with_sinks: bool
) -> None:
    """A chunk, a decode and padding in one call, with grouped heads and blocks out of order."""
    starts, tables = [2, 9], [[6, 1], [3, 5, 2]]
    made = batch([[0] * 5, [0]], starts, tables, 4, pad=2)
    torch.manual_seed(1)
    q = torch.randn(8, 4, 6)
    sinks = torch.randn(4) if with_sinks else None
    out = Ops().paged_attention(
        q, handles[0], Backend().prepare(made, None, "x"),
        scale=0.4, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    assert out.shape == (8, 4, 4)
    rows = [(0, p) for p in range(2, 7)] + [(1, 9)]
    for t, (i, p) in enumerate(rows):
        at = [(tables[i][j // 4], j % 4) for j in range(p + 1)]
        for head in range(4):
            k, v = ([cache[b, o, head // 2].tolist() for b, o in at] for cache in handles[0])
            sink = float(sinks[head]) if sinks is not None else None
            wanted = naive(q[t, head].tolist(), k, v, 0.4, window, softcap, sink)
            assert out[t, head].tolist() == pytest.approx(wanted, abs=1e-5), (t, head)


# -------------------------------------------------------------------------- the rest of a layer


def test_norms() -> None:
    torch.manual_seed(0)
    x, residual, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    wanted = x * (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt() * (1 + w)
    assert torch.allclose(Ops().rms_norm(x, w, 1e-3, offset=1.0).double(), wanted, atol=1e-6)
    normed, total = Ops().add_rms_norm(x.clone(), residual.clone(), w, 1e-3)
    assert torch.equal(total, residual + x)
    assert torch.allclose(normed, Ops().rms_norm(residual + x, w, 1e-3))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [6, 4])
def test_rotary_is_a_rotation_by_the_position(interleaved: bool, rotated: int) -> None:
    torch.manual_seed(0)
    angles = torch.rand(20, rotated // 2)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    meta = Backend().prepare(batch([[0] * 3], [7], [[1, 2, 3]], 4), None, "x")
    q, k = torch.randn(3, 4, 6), torch.randn(3, 2, 6)
    for before, after in zip(
        (q, k), Ops().rotary(q, k, table, meta, interleaved=interleaved), strict=True
    ):
        for t in range(3):
            for j in range(rotated // 2):
                a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + rotated // 2)
                turn = torch.polar(torch.tensor(1.0), angles[7 + t, j])
                wanted = torch.complex(before[t, :, a], before[t, :, b]) * turn
                got = torch.complex(after[t, :, a], after[t, :, b])
                assert torch.allclose(got, wanted, atol=1e-6)
        assert torch.equal(after[..., rotated:], before[..., rotated:])


def test_linear_and_activation_and_embedding() -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 4), torch.randn(6, 4), torch.randn(6)
    assert torch.allclose(Ops().linear(x, w, bias=b), x @ w.T + b)
    gate, up = x[:, :2], x[:, 2:]
    assert torch.allclose(Ops().act_and_mul(x, "silu"), gate * torch.sigmoid(gate) * up)
    exact = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    assert torch.allclose(Ops().act_and_mul(x, "gelu"), exact, atol=1e-6)
    assert 0 < (Ops().act_and_mul(x, "gelu_tanh") - exact).abs().max() < 1e-2
    assert torch.equal(Ops().embedding(torch.tensor([5, 0]), w), w[[5, 0]])
    with pytest.raises(ValueError, match="LoRA"):
        Ops().linear(x, w, lora=object())


def test_every_op_has_a_portable_body() -> None:
    names = [n for n, v in vars(Ops).items() if callable(v) and not n.startswith("_")]
    # The identity, and what a backend may offer beside the ops that every one has.
    optional = {
        "tied_weight",
        "fuses",
        "supports",
        "decoder_layer",
        "decoder_layers",
        "decoder_logits",
    }
    optional |= {"packed_key", "store_packed", "load_packed", "kv_lost", "drain"}
    names = [name for name in names if name not in optional]
    assert len(names) >= 14
    assert [n for n in names if not callable(getattr(portable, n, None))] == []
    assert ExecutionPlan(16, (), "float32", "float32").world_size == 1
