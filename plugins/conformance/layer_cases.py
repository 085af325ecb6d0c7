"""Cases of what stands between the cache and the logits: products, norms, rotary positions, activations,
packed weights, and a whole layer as one operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from octavo.core.ops import DTYPES
from octavo.core.quantization import KEPT, form
from octavo.plugins import PackedWeight, QuantizedTensor, WeightSpec
from octavo.plugins.conformance import truth
from octavo.plugins.conformance.batches import build, draw, padded, rows_of
from octavo.plugins.conformance.case import (
    Case,
    Dice,
    Failed,
    Finding,
    NotOffered,
    demand,
    within,
)
from octavo.plugins.conformance.subject import Beside, Subject, get, given, rounded
from octavo.plugins.conformance.tolerance import (
    FORM_TOLERANCE,
    QUANTIZED_TOLERANCE,
    TOLERANCE,
    distance,
    rms_distance,
)
from octavo.plugins.conformance.truth import Array

Tensors = Mapping[str, torch.Tensor | QuantizedTensor]
Gate = Literal["silu", "gelu", "gelu_tanh"]


def _tolerance(subject: Subject, dtype: str) -> float:
    return TOLERANCE[subject.tolerance_word(dtype)]


def _rows(subject: Subject, dice: Dice, dtype: str) -> int:
    plan = subject.plan(*subject.beside(dtype))
    return rows_of(plan, dice, subject.size(64, 16))


def _stacked(
    dice: Dice, role: str, dtype: str, scheme: str | None = None
) -> tuple[WeightSpec, Tensors, Array]:
    """A weight of one to three parts with its tensors, and what they hold in float64."""
    k = (
        int(dice.choice([64, 128, 192, 320]))
        if scheme
        else int(dice.choice([32, 72, 96, 256, 300]))
    )
    outs = [int(dice.choice([8, 24, 40, 64, 100])) for _ in range(int(dice.integers(1, 4)))]
    gated = False
    if role == "gated":
        role, outs, gated = "linear", [outs[0]] * 2, True
    group = 0
    if scheme == "int4" or scheme in KEPT:
        group = int(dice.choice([g for g in (32, 64) if k % g == 0]))
    parts = tuple((f"part{i}", (n, k)) for i, n in enumerate(outs))
    spec = WeightSpec("weight", role, parts, scheme=scheme, group=group, gated=gated)  # type: ignore[arg-type]
    values = {name: rounded(dice.standard_normal(shape), DTYPES[dtype]) for name, shape in parts}
    tensors: Tensors = {n: torch.from_numpy(v).to(DTYPES[dtype]) for n, v in values.items()}
    return spec, tensors, np.concatenate(list(values.values()))


def _coded(dice: Dice, spec: WeightSpec) -> tuple[Tensors, Array]:
    """Parts as codes, scales and minima of the spec's form, and their values."""
    assert spec.scheme is not None
    parts: dict[str, torch.Tensor | QuantizedTensor] = {}
    values = []
    for name, (n, k) in spec.parts:
        group = spec.group or k
        scales = torch.from_numpy(dice.uniform(0.01, 0.1, (n, k // group)))
        if spec.scheme in ("int4", "codes4"):
            codes = torch.from_numpy(dice.integers(0, 16, (n, k), dtype=np.uint8))
            scales, minima = (
                scales.half(),
                torch.from_numpy(dice.uniform(-0.9, 0.0, (n, k // group))).half(),
            )
        else:
            codes = torch.from_numpy(dice.integers(-127, 128, (n, k), dtype=np.int8))
            scales, minima = scales.half() if spec.scheme in KEPT else scales.float(), None
        parts[name] = QuantizedTensor(spec.scheme, codes, scales, minima, group, torch.float32)
        wide = get(codes).reshape(n, -1, group) * get(scales)[..., None]
        if minima is not None:
            wide = wide + get(minima)[..., None]
        values.append(wide.reshape(n, k))
    return parts, np.concatenate(values)


def multiplies(
    subject: Subject, dice: Dice, dtype: str, role: str, strided: bool = False
) -> Finding:
    """linear over stacked parts, of rows with and without a stride."""
    spec, parts, weight = _stacked(dice, "linear" if role == "bias" else role, dtype)
    packed = subject.ops.pack_weight(parts, spec, dtype)
    rows = _rows(subject, dice, dtype)
    return _product(
        subject, dice, dtype, spec, packed, weight, rows, biased=role == "bias", strided=strided
    )


def _product(
    subject: Subject, dice: Dice, dtype: str, spec: WeightSpec, packed: PackedWeight, weight: Array,
    rows: int, tolerance: float | None = None, by_rms: bool = False, biased: bool = False,
    strided: bool = False,
) -> Finding:  # fmt: skip
    kind = subject.activation(dtype)
    n, k = spec.shape
    x = rounded(dice.standard_normal((rows, k)), kind)
    strided = dice.random() < 0.5 or strided
    given = Beside(subject, x, kind).view if strided else subject.put(x, kind)
    bias = None
    exact = x @ weight.T
    if spec.gated:  # only act_and_mul knows where gate and up rows lie
        out = subject.ops.act_and_mul(subject.ops.linear(given, packed), "silu")
        exact = truth.act_and_mul(exact, "silu")
    else:
        if biased:
            bias_spec = WeightSpec("bias", "bias", (("bias", (n,)),))
            bias, values = subject.pack(dice.standard_normal(n), bias_spec, dtype)
            exact = exact + values
        out = subject.ops.linear(given, packed, bias=bias)
    demand(out.shape[0] == rows, f"linear gave {tuple(out.shape)} for {rows} rows")
    measure = rms_distance if by_rms else distance
    bound = _tolerance(subject, dtype) if tolerance is None else tolerance
    return within(
        f"linear {rows} x {k} to {n}{' gated' if spec.gated else ''}{' with bias' if bias is not None else ''}",
        measure(get(out), exact), bound,
    )  # fmt: skip


def no_rows(subject: Subject, dice: Dice, dtype: str, scheme: str | None) -> Finding:
    """A step that finishes no prompt asks for the logits of no row."""
    plan = subject.plan(*subject.beside(dtype))
    if any(lane.row_buckets for lane in plan.lanes):
        raise NotOffered("rows of logits are padded to buckets")
    spec, parts, _ = _stacked(dice, "head", dtype, scheme)
    packed = subject.ops.pack_weight(parts, spec, dtype)
    x = subject.put(np.zeros((0, spec.shape[1])), subject.activation(dtype))
    out = subject.ops.linear(x, packed)
    demand(tuple(out.shape) == (0, spec.shape[0]), f"linear of no rows gave {tuple(out.shape)}")
    return Finding()


def quantised_codes(subject: Subject, dice: Dice, dtype: str, scheme: str) -> Finding:
    """A product with codes, scales and minima of a form, taken as they are; and rows of it as embeddings."""
    spec, _, _ = _stacked(dice, "linear", dtype, scheme)
    parts, weight = _coded(dice, spec)
    packed = subject.ops.pack_weight(parts, spec, dtype)
    bound = max(FORM_TOLERANCE.get(scheme, 1.5e-2), _tolerance(subject, dtype))
    rows = _rows(subject, dice, dtype)
    return _product(subject, dice, dtype, spec, packed, weight, rows, bound, by_rms=True)


def kept_codes(subject: Subject, dice: Dice, dtype: str, form: str) -> Finding:
    """A product with a checkpoint's codes is that with the numbers they stand for: nothing is quantised."""
    spec, _, _ = _stacked(dice, "linear", dtype, form)
    parts, weight = _coded(dice, spec)
    packed = subject.ops.pack_weight(parts, spec, dtype)
    return _product(subject, dice, dtype, spec, packed, weight, _rows(subject, dice, dtype))


def quantised_floats(subject: Subject, dice: Dice, dtype: str, scheme: str) -> Finding:
    """A product with float weights that the backend quantises itself."""
    spec, parts, weight = _stacked(dice, "linear", dtype, scheme)
    packed = subject.ops.pack_weight(parts, spec, dtype)
    bound = QUANTIZED_TOLERANCE.get(scheme, 2e-2)
    return _product(subject, dice, dtype, spec, packed, weight, 64, bound, by_rms=True)


def quantised_rows(subject: Subject, dice: Dice, dtype: str, scheme: str) -> Finding:
    """embedding from codes."""
    n, k = 40, 128
    group = 32 if scheme in KEPT else 0
    spec = WeightSpec("e", "embedding", (("e", (n, k)),), scheme=scheme, group=group)
    if not form(scheme).holds((n, k), group):
        raise NotOffered(f"{scheme} holds no whole rows of {k}")
    parts, values = _coded(dice, spec)
    packed = subject.ops.pack_weight(parts, spec, dtype)
    ids = dice.integers(0, n, _rows(subject, dice, dtype))
    out = subject.ops.embedding(subject.ids(ids), packed)
    bound = max(1e-6, _tolerance(subject, dtype))
    return within("rows of codes", distance(get(out), values[ids]), bound)


def embeds(subject: Subject, dice: Dice, dtype: str) -> Finding:
    """embedding gives the rows themselves; a head tied to it multiplies with them."""
    n, k = int(dice.choice([50, 101, 640])), int(dice.choice([32, 72, 256]))
    spec = WeightSpec("e", "embedding", (("e", (n, k)),), shard_axis=0)
    packed, values = subject.pack(dice.standard_normal((n, k)), spec, dtype)
    ids = dice.integers(0, n, _rows(subject, dice, dtype))
    ids[:1], ids[-1:] = n - 1, 0
    out = subject.ops.embedding(subject.ids(ids), packed)
    exact = rounded(values, subject.activation(dtype))
    error = distance(get(out), exact[ids])
    return within(f"rows of an embedding {n} x {k}", error, 0.0)


def tied(subject: Subject, dice: Dice, dtype: str) -> Finding:
    """The head made from an embedding multiplies with the embedding's rows."""
    n, k = int(dice.choice([50, 101, 640])), int(dice.choice([32, 72, 256]))
    parts = (("e", (n, k)),)
    packed, values = subject.pack(
        dice.standard_normal((n, k)), WeightSpec("e", "embedding", parts, shard_axis=0), dtype
    )
    spec = WeightSpec("h", "head", parts, shard_axis=0, alias="e")
    head = subject.ops.tied_weight(packed, spec)
    return _product(subject, dice, dtype, spec, head, values, _rows(subject, dice, dtype))


def norms(subject: Subject, dice: Dice, dtype: str, added: bool, strided: bool = False) -> Finding:
    """rms_norm and add_rms_norm, with an offset and without. strided: of rows that are views of wider ones."""
    kind, rows = subject.activation(dtype), _rows(subject, dice, dtype)
    size = int(dice.choice([32, 96, 100, 576, 1024]))
    eps, offset = float(dice.choice([1e-5, 1e-6, 1e-2])), float(dice.choice([0.0, 1.0]))
    spec = WeightSpec("n", "norm", (("n", (size,)),))
    weight, values = subject.pack(dice.standard_normal(size), spec, dtype)
    # Rows of different sizes: a small one shows where eps stands.
    x = rounded(
        dice.standard_normal((rows, size)) * dice.choice([1e-3, 1.0, 30.0], (rows, 1)), kind
    )
    bound = _tolerance(subject, dtype)
    residual = rounded(dice.standard_normal((rows, size)), kind) if added else x
    wide = [Beside(subject, each, kind) for each in (x, residual)] if strided else []
    first, second = (
        (w.view for w in wide) if wide else (subject.put(v, kind) for v in (x, residual))
    )
    of = f"{rows} rows of {size}{', a view of wider ones' if strided else ''}"
    if not added:
        out = subject.ops.rms_norm(first, weight, eps, offset=offset)
        got = given("rms_norm", out, x.shape, kind)
        error = distance(got, truth.rms_norm(x, values, eps, offset))
        found = within(f"rms_norm ({of})", error, bound)
    else:
        normed, total = subject.ops.add_rms_norm(first, second, weight, eps, offset=offset)
        # The sum is rounded before it is normed, or after: both are in use.
        exact = truth.rms_norm(x + residual, values, eps, offset)
        error = distance(given("add_rms_norm's sum", total, x.shape, kind), x + residual)
        within(f"the sum of add_rms_norm ({of})", error, bound)
        got = given("add_rms_norm", normed, x.shape, kind)
        found = within(f"add_rms_norm ({of})", max(error, distance(got, exact)), bound)
    for each in wide:
        each.check("add_rms_norm" if added else "rms_norm")
    return found


def norms_of_heads(subject: Subject, dice: Dice, dtype: str) -> Finding:
    """rms_norm of single heads [T, heads, n], as they lie in the fused projection."""
    kind, rows = subject.activation(dtype), _rows(subject, dice, dtype)
    size, heads = subject.head_size(dice), subject.heads(dice)[0]
    weight, values = subject.pack(
        dice.standard_normal(size), WeightSpec("n", "norm", (("n", (size,)),)), dtype
    )
    x = rounded(dice.standard_normal((rows, heads, size)), kind)
    wide = Beside(subject, x, kind)
    out = subject.ops.rms_norm(wide.view, weight, 1e-5)
    got = given("rms_norm", out, x.shape, kind)
    wide.check("rms_norm")
    error = distance(got, truth.rms_norm(x, values, 1e-5, 0.0))
    what = f"rms_norm of {heads} heads of {size} in {rows} rows"
    return within(what, error, _tolerance(subject, dtype))


def rotates(subject: Subject, dice: Dice, dtype: str, interleaved: bool) -> Finding:
    """rotary by the positions of a real batch, of whole heads and of their first part."""
    kind, heads, size = (
        subject.activation(dtype),
        subject.heads(dice),
        subject.head_size(dice),
    )
    plan = subject.plan(*subject.beside(dtype), heads=heads, head_size=size)
    plan = padded(plan, subject.capabilities.shapes == "dynamic", dice)
    step = draw(dice, plan, "mixed", range(1, 24), 200)
    batch = build(plan, step)
    rows = len(batch.token_ids)
    turned = size if dice.random() < 0.5 or size < 16 else size // 4 * 2
    angles = dice.uniform(-np.pi, np.pi, (512, turned // 2))
    table = rounded(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), torch.float32)
    both = rounded(dice.standard_normal((rows, sum(heads) + heads[1], size)), kind)
    tensor = subject.put(both, kind)
    q, k = tensor[:, : heads[0]], tensor[:, heads[0] : sum(heads)]
    meta = subject.prepare(batch)
    got = subject.ops.rotary(q, k, subject.put(table, torch.float32), meta, interleaved=interleaved)
    real = batch.num_tokens
    positions = batch.positions[:real]
    error = 0.0
    for mine, first, last in ((got[0], 0, heads[0]), (got[1], heads[0], sum(heads))):
        exact = truth.rotary(both[:real, first:last], table, positions, interleaved)
        numbers = given("rotary", mine, (rows, last - first, size), kind)
        error = max(error, distance(numbers[:real], exact))
    return within(f"rotary of {turned} of {size}", error, _tolerance(subject, dtype))


def activates(
    subject: Subject, dice: Dice, dtype: str, kind: Gate, strided: bool = False
) -> Finding:
    """act_and_mul of one kind. strided: of rows that are a view of wider ones."""
    rows, half = _rows(subject, dice, dtype), int(dice.choice([16, 52, 100, 512]))
    dt = subject.activation(dtype)
    x = rounded(dice.standard_normal((rows, 2 * half)) * 3, dt)
    wide = Beside(subject, x, dt)
    tensor = wide.view if strided else subject.put(x, dt)
    out = subject.ops.act_and_mul(tensor, kind)
    got = given(f"act_and_mul {kind}", out, (rows, half), dt)
    wide.check(f"act_and_mul {kind}")
    error = distance(got, truth.act_and_mul(x, kind))
    return within(f"act_and_mul {kind}", error, _tolerance(subject, dtype))


def keeps_packed(subject: Subject, dice: Dice, dtype: str, scheme: str | None) -> Finding:
    """store_packed's bytes, read by load_packed, compute the same bits; other sizes are refused."""
    ops = subject.ops
    if ops.packed_key() is None:
        raise NotOffered("packed_key() names no layout: packed weights are not kept")
    demand(ops.packed_key() == ops.packed_key(), "packed_key() says something else each time")
    spec, parts, _ = _stacked(dice, "linear", dtype, scheme)
    packed = ops.pack_weight(parts, spec, dtype)
    data = ops.store_packed(packed, spec)
    demand(data.dtype == torch.uint8 and data.dim() == 1, "store_packed gives no uint8 [bytes]")
    demand(
        data.numel() <= ops.weight_bytes(spec, dtype),
        f"{data.numel()} bytes stored, weight_bytes says {ops.weight_bytes(spec, dtype)}",
    )
    # As in a mapped file: at a multiple of 64, and never written to.
    space = torch.zeros(data.numel() + 64, dtype=torch.uint8)
    start = -space.data_ptr() % 64
    mapped = space[start : start + data.numel()]
    mapped.copy_(data)
    again = ops.load_packed(mapped, spec, dtype)
    x = subject.put(dice.standard_normal((8, spec.shape[1])), subject.activation(dtype))
    same = torch.equal(ops.linear(x, packed).cpu(), ops.linear(x, again).cpu())
    demand(same, "a weight loaded from its stored bytes computes something else")
    demand(torch.equal(mapped, data.cpu()), "load_packed or linear wrote to the mapped bytes")
    try:
        ops.load_packed(mapped[:-64], spec, dtype)
    except ValueError:
        return Finding()
    raise Failed("load_packed took fewer bytes than the weight has, without a ValueError")


def cases(subject: Subject, full: bool) -> list[Case]:
    """All cases of this file but those of the fused layer."""
    made: list[Case] = []
    more = 4 if full else 1

    def add(op: str, dtype: str, aspect: str, count: int, body: Any, *given: Any) -> None:
        made.extend(
            Case("op", op, dtype, aspect, i, lambda s, d: body(s, d, *given))
            for i in range(count * more)
        )

    for dtype in subject.dtypes:
        add("linear", dtype, "plain", 4, multiplies, dtype, "linear")
        add("linear", dtype, "bias", 3, multiplies, dtype, "bias")
        add("linear", dtype, "gated", 2, multiplies, dtype, "gated")
        add("linear", dtype, "head", 2, multiplies, dtype, "head")
        add("linear", dtype, "strided", 1, multiplies, dtype, "linear", True)
        add("linear", dtype, "no-rows", 1, no_rows, dtype, None)
        add("embedding", dtype, "rows", 3, embeds, dtype)
        add("tied_weight", dtype, "head", 2, tied, dtype)
        add("rms_norm", dtype, "", 4, norms, dtype, False)
        add("rms_norm", dtype, "strided", 2, norms, dtype, False, True)
        add("rms_norm", dtype, "heads", 2, norms_of_heads, dtype)
        add("add_rms_norm", dtype, "", 4, norms, dtype, True)
        add("add_rms_norm", dtype, "strided", 2, norms, dtype, True, True)
        add("rotary", dtype, "halves", 3, rotates, dtype, False)
        add("rotary", dtype, "interleaved", 3, rotates, dtype, True)
        for kind in ("silu", "gelu", "gelu_tanh"):
            add("act_and_mul", dtype, kind, 2, activates, dtype, kind)
            add("act_and_mul", dtype, f"{kind}-strided", 1, activates, dtype, kind, True)
        add("store_packed", dtype, "", 2, keeps_packed, dtype, None)
    for scheme in subject.capabilities.quantization:
        for dtype in subject.dtypes if full else subject.dtypes[:1]:
            name = f"{scheme} over {dtype}".replace(" ", "-")
            add("linear", name, "codes", 3, quantised_codes, dtype, scheme)
            add("linear", name, "no-rows", 1, no_rows, dtype, scheme)
            add("linear", name, "floats", 2, quantised_floats, dtype, scheme)
            add("embedding", name, "codes", 2, quantised_rows, dtype, scheme)
            add("store_packed", name, "", 2, keeps_packed, dtype, scheme)
    for kept in subject.capabilities.kept_codes:
        add("linear", f"{kept}-over-float32", "kept", 3, kept_codes, "float32", kept)
        add("embedding", f"{kept}-over-float32", "kept", 2, quantised_rows, "float32", kept)
    return made
