"""How fast an op is beside the portable one, on the same device and the same work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from octavo.core import ops as portable_ops
from octavo.core.contract import SampleInputs
from octavo.plugins import KVSpec, Ops, WeightSpec
from octavo.plugins.conformance.batches import Piece, Step, build, room
from octavo.plugins.conformance.case import NotOffered
from octavo.plugins.conformance.subject import Subject, best_seconds

HEADS, SIZE, CONTEXT = (8, 2), 64, 160

WIDTH, VOCABULARY = 1024, 4096

HEADS_WORDS = f"{HEADS[0]} and {HEADS[1]} heads of {SIZE}"

Work = tuple[Callable[[], Any], str]
"""Something to run, and its shape in words."""


def speeds(
    subject: Subject, rows: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], tuple[float, str]]:
    """By (op, dtype): the portable op's time over this backend's, and at which shape. Rows without a
    workload, or that cannot run so on this device, are left out."""
    found = {}
    with torch.inference_mode():
        for op, dtype in rows:
            try:
                mine = _work(subject, op, dtype, subject.ops, subject.prepare)
                theirs = _work(subject, op, dtype, subject.portable, _plain(subject))
                if mine is None or theirs is None:
                    continue
                (run, shape), (run_theirs, _) = mine, theirs
                run(), run_theirs()
                own = best_seconds(run, subject.settle)
                found[op, dtype] = round(best_seconds(run_theirs, subject.settle) / own, 3), shape
            except (RuntimeError, NotImplementedError, NotOffered, ValueError, TypeError, KeyError):
                continue  # the portable op cannot stand in here (a KV dtype of the backend's own)
    return found


def _plain(subject: Subject) -> Callable[[Any], Any]:
    return lambda batch: portable_ops.prepare(batch, None, subject.torch_device)


def _work(
    subject: Subject, op: str, row: str, ops: Ops, prepare: Callable[[Any], Any]
) -> Work | None:
    scheme = row.partition("-over-")[0] if "-over-" in row else None
    dtype, _, kv_dtype = row.rpartition("-over-")[2].partition(",kv=")
    if op in ("write_kv", "paged_attention", "rotary", "copy_blocks"):
        return _cached(subject, op, dtype, kv_dtype or dtype, ops, prepare)
    if op in ("sample", "token_logprobs"):
        return _drawing(subject, op, ops)
    kind = subject.activation(dtype if dtype in subject.dtypes else subject.dtypes[0])
    if ops is subject.portable and scheme is None:
        kind = portable_ops.DTYPES[dtype]
    x = torch.ones(64, WIDTH, dtype=kind, device=subject.torch_device)
    shape = f"64 rows of {WIDTH}"
    if op in ("linear", "embedding", "tied_weight"):
        role: Any = "embedding" if op == "embedding" else "linear"
        group = 32 if scheme == "int4" else 0
        spec = WeightSpec("w", role, (("w", (WIDTH, WIDTH)),), scheme=scheme, group=group)
        weight = ops.pack_weight({"w": torch.ones(WIDTH, WIDTH)}, spec, dtype)
        if op == "embedding":
            ids = torch.arange(64, device=subject.torch_device)
            return lambda: ops.embedding(ids, weight), f"64 of {WIDTH} rows of {WIDTH}"
        return lambda: ops.linear(x[:8], weight), f"8 rows, {WIDTH} to {WIDTH}"
    if op in ("rms_norm", "add_rms_norm"):
        spec = WeightSpec("n", "norm", (("n", (WIDTH,)),))
        weight = ops.pack_weight({"n": torch.ones(WIDTH)}, spec, dtype)
        if op == "rms_norm":
            return lambda: ops.rms_norm(x, weight, 1e-5), shape
        other = torch.ones_like(x)
        return lambda: ops.add_rms_norm(x, other, weight, 1e-5), shape
    if op == "act_and_mul":
        return lambda: ops.act_and_mul(x, "silu"), shape
    return None


def _cached(
    subject: Subject, op: str, dtype: str, kv_dtype: str, ops: Ops, prepare: Callable[[Any], Any]
) -> Work:
    """A decode step of some sequences of `CONTEXT` tokens."""
    plan = subject.plan(dtype, kv_dtype, heads=HEADS, head_size=SIZE)
    if subject.capabilities.refuses_head_size(SIZE):
        raise NotOffered("another head size")
    number = next((i for i, x in enumerate(plan.lanes) if set(x.kinds) & {"mixed", "decode"}), 0)
    seqs = min(8, room(plan.lanes[number])[0])
    per = -(-CONTEXT // plan.block_size)
    pieces = tuple(
        Piece(CONTEXT - 1, 1, tuple(range(1 + i * per, 1 + (i + 1) * per))) for i in range(seqs)
    )
    spec = KVSpec((0, 1), HEADS[1], SIZE, SIZE, plan.kv_dtype)
    blocks = 1 + seqs * per
    handles = ops.alloc_kv([spec], blocks, plan.block_size)
    width = 1  # zeros in every block: numbers of any format
    exported = ops.export_blocks(handles, [0])
    width = (exported if isinstance(exported, torch.Tensor) else exported.wait()).shape[1]
    zeros = torch.zeros(blocks, width, dtype=torch.uint8)
    state = {"kv": ops.import_blocks(zeros, handles, list(range(blocks)))}
    if op == "copy_blocks":

        def copy() -> None:
            state["kv"] = ops.copy_blocks(state["kv"], [(1, 2), (1, 3)])

        return copy, f"2 copies of {plan.block_size} tokens, 2 layers"
    meta = prepare(build(plan, Step(number, pieces)))
    rows = len(meta.token_ids)
    kind = subject.activation(dtype)
    q = torch.ones(rows, HEADS[0], SIZE, dtype=kind, device=subject.torch_device)
    k = torch.ones(rows, HEADS[1], SIZE, dtype=kind, device=subject.torch_device)
    if op == "rotary":
        table = torch.ones(512, SIZE, device=subject.torch_device)
        return lambda: ops.rotary(q, k, table, meta), f"{rows} rows, {HEADS_WORDS}"
    if op == "write_kv":

        def write() -> None:
            state["kv"][0] = ops.write_kv(state["kv"][0], k, k, meta)

        return write, f"{rows} rows, {HEADS[1]} heads of {SIZE}"
    return (
        lambda: ops.paged_attention(q, state["kv"][0], meta, scale=SIZE**-0.5),
        f"{seqs} x {CONTEXT} tokens, {HEADS_WORDS}",
    )


def _drawing(subject: Subject, op: str, ops: Ops) -> Work:
    dice = np.random.default_rng(1)
    logits = subject.put(dice.standard_normal((8, VOCABULARY)), torch.float32)
    shape = f"8 rows of {VOCABULARY}"
    if op == "token_logprobs":
        ids = subject.ids([5] * 8)
        return lambda: ops.token_logprobs(logits, ids), shape

    def column(value: float, kind: Any) -> torch.Tensor:
        return torch.from_numpy(np.full(8, value, kind)).to(subject.torch_device)

    rows = SampleInputs(
        temperature=column(1, np.float32),
        top_k=column(50, np.int32),
        top_p=column(0.9, np.float32),
        min_p=column(0, np.float32),
        seed=column(7, np.int64),
        counter=column(3, np.int64),
    )
    return lambda: ops.sample(logits.clone(), rows), shape
