"""Every vendor call under FakeTensor on device `npu`: torch-npu's own schemas and shape functions, no numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from wide_blocks import BLOCK, BLOCKS, DECODES, MIXED, make_batch

from octavo.backends.ascend import inputs
from octavo.backends.ascend.ops import AscendOps
from octavo.backends.ascend.vendor import vendor
from octavo.plugins import KVSpec

Q_HEADS, KV_HEADS, SIZE, HIDDEN = 8, 2, 64, 512


class Names(TorchDispatchMode):
    """Which of the vendor's operations were dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("npu", "atb"):
            self.seen.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kinds", [MIXED, DECODES])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_and_writes(kinds: tuple[tuple[int, int], ...], window: int, sinks: bool) -> None:
    batch = make_batch(kinds, 3)
    rows = batch.num_tokens + 3
    with FakeTensorMode(allow_non_fake_inputs=True), Names() as names:

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="npu")

        ops = AscendOps("npu", vendor())
        handle = ops.alloc_kv([KVSpec((0,), KV_HEADS, SIZE, SIZE, "bfloat16")], BLOCKS, BLOCK)[0]

        def upload(array: Any) -> torch.Tensor:
            return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device="npu")

        meta = inputs.prepare(batch, upload)
        k, v = make(rows, KV_HEADS, SIZE), make(rows, KV_HEADS, SIZE)
        ops.write_kv(handle, k, v, meta)
        out = ops.paged_attention(
            make(rows, Q_HEADS, SIZE),
            handle,
            meta,
            scale=0.125,
            window=window,
            sinks=make(Q_HEADS) if sinks else None,
        )
    assert out.shape == (rows, Q_HEADS, SIZE) and out.dtype == torch.bfloat16
    assert out.device.type == "npu"
    if sinks:
        attention = "npu::npu_fused_infer_attention_score_v2"
    elif window or kinds is MIXED:
        attention = "npu::npu_fused_infer_attention_score"
    else:
        attention = "atb::_npu_paged_attention"
    assert names.seen == {"atb::_npu_reshape_and_cache", attention}


def test_the_rest_of_a_layer() -> None:
    batch = make_batch(MIXED, 0)
    rows = batch.num_tokens
    with FakeTensorMode(allow_non_fake_inputs=True), Names() as names:

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="npu")

        def upload(array: Any) -> torch.Tensor:
            return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device="npu")

        ops = AscendOps("npu", vendor())
        meta = inputs.prepare(batch, upload)
        normed = ops.rms_norm(make(rows, HIDDEN), make(HIDDEN), 1e-6)
        added, residual = ops.add_rms_norm(
            make(rows, HIDDEN), make(rows, HIDDEN), make(HIDDEN), 1e-6
        )
        table = make(1024, SIZE, dtype=torch.float32)
        q, k = ops.rotary(make(rows, Q_HEADS, SIZE), make(rows, KV_HEADS, SIZE), table, meta)
        gated = ops.act_and_mul(make(rows, 2 * HIDDEN), "silu")
    for found in (normed, added, residual, gated):
        assert found.shape == (rows, HIDDEN) and found.dtype == torch.bfloat16
    assert q.shape == (rows, Q_HEADS, SIZE) and k.shape == (rows, KV_HEADS, SIZE)
    assert q.dtype == torch.bfloat16
    assert names.seen == {
        "npu::npu_rms_norm",
        "npu::npu_add_rms_norm",
        "npu::npu_rotary_mul",
        "npu::npu_swiglu",
    }


def test_torch_npu_can_change_the_lengths_of_what_graphs_hold() -> None:
    """The attention calls of a decode step are among those that `NPUGraph.update` launches anew."""
    from torch_npu.npu._npugraph_handlers.npugraph_handler import _NPU_GRAPH_OP_HANDLERS

    for name in (
        "_npu_paged_attention.default",
        "npu_fused_infer_attention_score.default",
        "npu_fused_infer_attention_score_v2.default",
    ):
        assert name in _NPU_GRAPH_OP_HANDLERS


def test_a_wrong_argument_is_found_out() -> None:
    """The schemas are real: they refuse what they do not know."""
    with FakeTensorMode(), pytest.raises((RuntimeError, TypeError), match="blok_table"):
        x = torch.empty(4, 8, 64, device="npu", dtype=torch.bfloat16)
        vendor().npu_fused_infer_attention_score(x, x, x, blok_table=x)
