"""Cases of what encoders run: attention to all positions, layer norms and plain activations. Asked of backends
that declare `Capabilities.encoders`."""

from __future__ import annotations

from typing import Any, Literal

from octavo.plugins import WeightSpec
from octavo.plugins.conformance import truth
from octavo.plugins.conformance.batches import Piece, Step, build, padded, room, rows_of
from octavo.plugins.conformance.case import Case, Dice, Finding, within
from octavo.plugins.conformance.subject import Beside, Subject, get, given, rounded, strided
from octavo.plugins.conformance.tolerance import TOLERANCE, distance

Function = Literal["gelu", "gelu_tanh", "relu"]


def _tolerance(subject: Subject, dtype: str) -> float:
    return TOLERANCE[subject.tolerance_word(dtype)]


def _plan(subject: Subject, dtype: str, **sizes: Any) -> Any:
    kv = subject.capabilities.kv_dtypes
    return subject.plan(dtype, dtype if dtype in kv else kv[0], **sizes)


def attends(subject: Subject, dice: Dice, dtype: str, shared: bool) -> Finding:
    """encoder_attention over whole sequences, some of one token; shared: with fewer KV heads."""
    heads = (8, 2) if shared else (4, 4)
    size = subject.head_size(dice)
    plan = padded(
        _plan(subject, dtype, heads=heads, head_size=size),
        subject.capabilities.shapes == "dynamic",
        dice,
    )
    lane = next(i for i, each in enumerate(plan.lanes) if set(each.kinds) & {"mixed", "prefill"})
    seqs, tokens = room(plan.lanes[lane])
    pieces: list[Piece] = []
    block = 1
    for _ in range(min(seqs, int(dice.integers(1, 6)))):
        length = int(dice.choice([1, 2, 17, 33, subject.size(90, 20)]))
        if sum(piece.count for piece in pieces) + length > tokens:
            break
        need = -(-length // plan.block_size)
        pieces.append(Piece(0, length, tuple(range(block, block + need))))
        block += need
    batch = build(plan, Step(lane, tuple(pieces)))
    rows = len(batch.token_ids)
    kind = subject.activation(dtype)
    both = rounded(dice.standard_normal((rows, heads[0] + 2 * heads[1], size)), kind)
    q, k, v = strided(subject.put(both, kind), [heads[0], heads[1], heads[1]])
    meta = subject.prepare(batch)
    scale = size**-0.5
    out = subject.ops.encoder_attention(q, k, v, meta, scale=scale)
    got = given("encoder_attention", out, (rows, heads[0], size), kind)
    error = 0.0
    starts = batch.query_start.tolist()
    for i in range(len(pieces)):
        part = both[starts[i] : starts[i + 1]]
        exact = truth.attention(
            part[:, : heads[0]], part[:, heads[0] : sum(heads)], part[:, sum(heads) :],
            scale=scale, causal=False,
        )  # fmt: skip
        error = max(error, distance(got[starts[i] : starts[i + 1]], exact))
    what = f"encoder_attention of {len(pieces)} sequences"
    return within(what, error, _tolerance(subject, dtype))


def norms(subject: Subject, dice: Dice, dtype: str, as_view: bool = False) -> Finding:
    """layer_norm of rows of different sizes, which do not lie around 0. as_view: of wider rows."""
    kind, rows = (
        subject.activation(dtype),
        rows_of(_plan(subject, dtype), dice, subject.size(64, 16)),
    )
    size = int(dice.choice([32, 96, 100, 576, 1024]))
    eps = float(dice.choice([1e-5, 1e-12, 1e-2]))
    weight, w = subject.pack(
        dice.standard_normal(size), WeightSpec("n", "norm", (("n", (size,)),)), dtype
    )
    bias, b = subject.pack(
        dice.standard_normal(size), WeightSpec("b", "bias", (("b", (size,)),)), dtype
    )
    scale = dice.choice([1e-1, 1.0, 30.0], (rows, 1))
    x = rounded((dice.standard_normal((rows, size)) + 0.5) * scale, kind)
    tensor = Beside(subject, x, kind).view if as_view else subject.put(x, kind)
    out = subject.ops.layer_norm(tensor, weight, bias, eps)
    got = given("layer_norm", out, x.shape, kind)
    return within(
        "layer_norm", distance(got, truth.layer_norm(x, w, b, eps)), _tolerance(subject, dtype)
    )


def activates(
    subject: Subject, dice: Dice, dtype: str, function: Function, as_view: bool = False
) -> Finding:
    """activation of one kind. as_view: of wider rows."""
    kind, rows = (
        subject.activation(dtype),
        rows_of(_plan(subject, dtype), dice, subject.size(64, 16)),
    )
    x = rounded(dice.standard_normal((rows, int(dice.choice([16, 52, 512])))) * 3, kind)
    tensor = Beside(subject, x, kind).view if as_view else subject.put(x, kind)
    out = subject.ops.activation(tensor, function)
    given(f"activation {function}", out, x.shape, kind)
    error = distance(get(out), truth.activation(x, function))
    return within(f"activation {function}", error, _tolerance(subject, dtype))


def cases(subject: Subject, full: bool) -> list[Case]:
    """All cases of this file; none for a backend without encoders."""
    made: list[Case] = []
    if not subject.capabilities.encoders:
        return made
    more = 4 if full else 1

    def add(op: str, dtype: str, aspect: str, count: int, body: Any, *given: Any) -> None:
        made.extend(
            Case("op", op, dtype, aspect, i, lambda s, d: body(s, d, *given))
            for i in range(count * more)
        )

    for dtype in subject.dtypes:
        add("encoder_attention", dtype, "whole", 3, attends, dtype, False)
        add("encoder_attention", dtype, "shared", 2, attends, dtype, True)
        add("layer_norm", dtype, "", 3, norms, dtype)
        add("layer_norm", dtype, "strided", 1, norms, dtype, True)
        for function in ("gelu", "gelu_tanh", "relu"):
            add("activation", dtype, function, 2, activates, dtype, function)
            add("activation", dtype, f"{function}-strided", 1, activates, dtype, function, True)
    return made
