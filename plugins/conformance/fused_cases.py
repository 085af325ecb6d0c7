"""Cases of a whole decoder layer as one operation, where a backend offers one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from octavo.core.contract import Ctx, DecoderSpec
from octavo.core.layers.decoder import (
    DECODER_LAYERS,
    DECODER_LOGITS,
    ROTARY,
    Attention,
    DecoderLayer,
    GatedMLP,
)
from octavo.core.layers.module import Embedding, Head, RMSNorm
from octavo.core.models.base import wanted
from octavo.core.ops import DTYPES
from octavo.plugins.conformance import truth
from octavo.plugins.conformance.batches import build, draw, history, padded
from octavo.plugins.conformance.cache_cases import LAYERS, Cache
from octavo.plugins.conformance.case import Case, Dice, Finding, NotOffered, demand, within
from octavo.plugins.conformance.subject import Subject, get, rounded
from octavo.plugins.conformance.tolerance import KV_TOLERANCE, TOLERANCE, distance
from octavo.plugins.conformance.truth import Array

HEADS = ((4, 2), (6, 2), (5, 1), (4, 4))
POSITIONS = 512


class Layer:
    """A decoder layer's parts by the engine's own classes, and its weights."""

    def __init__(
        self, subject: Subject, dice: Dice, dtype: str, window: int, bias: bool, act: Any
    ) -> None:
        self.heads = HEADS[int(dice.integers(len(HEADS)))]
        self.size = subject.head_size(dice)
        self.hidden = int(dice.choice([32, 96, 128]))
        self.inner = int(dice.choice([16, 52, 96]))
        self.window, self.act, self.eps = window, act, 1e-5
        ops = subject.ops
        self.layer = DecoderLayer(
            ops,
            RMSNorm(ops, "n1", self.hidden, self.eps),
            Attention(
                ops, "a", 0, hidden=self.hidden, q_heads=self.heads[0], kv_heads=self.heads[1],
                head_size=self.size, window=window, qkv_bias=bias, out_bias=bias,
            ),
            RMSNorm(ops, "n2", self.hidden, self.eps),
            GatedMLP(ops, "m", hidden=self.hidden, intermediate=self.inner, act=act, bias=bias),
        )  # fmt: skip
        self.weights: dict[str, Any] = {}
        self.values: dict[str, Array] = {}
        for spec in self.layer.specs():
            parts = {}
            for name, shape in spec.parts:
                around = 1.0 if spec.role == "norm" else 0.0
                raw = around + dice.standard_normal(shape) * (
                    0.3 if len(shape) == 1 else shape[-1] ** -0.5
                )
                self.values[name] = rounded(raw, DTYPES[dtype])
                parts[name] = torch.from_numpy(self.values[name]).to(DTYPES[dtype])
            self.weights[spec.name] = ops.pack_weight(parts, spec, dtype)
        angles = dice.uniform(-np.pi, np.pi, (POSITIONS, self.size // 2))
        self.table = rounded(np.concatenate([np.cos(angles), np.sin(angles)], 1), torch.float32)
        self.weights[ROTARY] = subject.put(self.table, torch.float32)

    def linear(self, x: Array, name: str) -> Array:
        result: Array = x @ self.values[f"{name}.weight"].T + self.values.get(f"{name}.bias", 0.0)
        return result

    def exact(self, contexts: list[tuple[Array, int]]) -> Array:
        """The last rows of each sequence x [context, hidden], how many of them; all pasts are inputs to
        this layer too."""
        out = []
        for x, count in contexts:
            positions = np.arange(len(x))
            h = truth.rms_norm(x, self.values["n1.weight"], self.eps, 0.0)
            q, k, v = (self.linear(h, f"a.{p}_proj").reshape(len(x), -1, self.size) for p in "qkv")
            q, k = (truth.rotary(t, self.table, positions, False) for t in (q, k))
            mixed = truth.attention(q[-count:], k, v, scale=self.size**-0.5, window=self.window)
            y = x[-count:] + self.linear(mixed.reshape(count, -1), "a.o_proj")
            h = truth.rms_norm(y, self.values["n2.weight"], self.eps, 0.0)
            gate_up = np.concatenate([self.linear(h, f"m.{p}_proj") for p in ("gate", "up")], 1)
            out.append(y + self.linear(truth.act_and_mul(gate_up, self.act), "m.down_proj"))
        return np.concatenate(out)


def whole_layer(subject: Subject, dice: Dice, dtype: str, kv_dtype: str, window: bool) -> Finding:
    """decoder_layer over ragged pieces, its cache filled by itself, against float64."""
    act = str(dice.choice(["silu", "gelu", "gelu_tanh"]))
    made = Layer(
        subject, dice, dtype, int(dice.choice([5, 17])) if window else 0, dice.random() < 0.5, act
    )
    if made.layer.fused is None:
        raise NotOffered("decoder_layer is not offered for such a layer: the smaller ops run it")
    cache = Cache.drawn(
        subject, dice, dtype, kv_dtype, 24, heads=made.heads, head_size=made.size, longest=400
    )
    cache.plan = padded(cache.plan, subject.capabilities.shapes == "dynamic", dice)
    step = draw(dice, cache.plan, "mixed", range(1, 24), min(POSITIONS, 200))
    kind = subject.activation(dtype)
    inputs = [rounded(dice.standard_normal((p.context, made.hidden)), kind) for p in step.pieces]
    for past, (i,) in history(cache.plan, step.pieces):
        piece = past.pieces[0]
        _run(subject, cache, made, past, inputs[i][piece.start : piece.context], kind)
    fresh = [x[p.start :] for x, p in zip(inputs, step.pieces, strict=True)]
    out = _run(subject, cache, made, step, np.concatenate(fresh), kind)
    exact = made.exact([(x, p.count) for x, p in zip(inputs, step.pieces, strict=True)])
    bound = 3 * TOLERANCE[subject.tolerance_word(dtype)]
    rounds = 3 * TOLERANCE[kv_dtype] if kv_dtype in TOLERANCE else 2 * KV_TOLERANCE["int8"]
    demand(len(cache.handles) == LAYERS, "decoder_layer lost a handle")
    return within("decoder_layer", distance(get(out[: len(exact)]), exact), max(bound, rounds))


def several_layers(subject: Subject, dice: Dice, dtype: str, kv_dtype: str) -> Finding:
    """decoder_layers: the bits of decoder_layer one after the other, also in the step after, and of the rows
    whose logits are wanted where it may leave out the others."""
    made = Layer(subject, dice, dtype, 0, dice.random() < 0.5, "silu")
    specs = tuple(dataclasses.replace(made.layer.spec, layer=i) for i in range(LAYERS))
    fused, ops = made.layer.fused, subject.ops
    if fused is None or not all(ops.fuses(DECODER_LAYERS, spec) for spec in specs):
        raise NotOffered("decoder_layers is not offered for such layers: they run one by one")
    cache = Cache.drawn(
        subject, dice, dtype, kv_dtype, 24, heads=made.heads, head_size=made.size, longest=400
    )
    cache.plan = padded(cache.plan, subject.capabilities.shapes == "dynamic", dice)
    kind = subject.activation(dtype)
    for _ in range(2):
        step = draw(dice, cache.plan, "mixed", range(1, 24), min(POSITIONS, 200))
        for past in (*(past for past, _ in history(cache.plan, step.pieces)), step):
            batch = build(cache.plan, past)
            x = rounded(dice.standard_normal((len(batch.token_ids), made.hidden)), kind)
            ctx = Ctx(made.weights, cache.handles, subject.prepare(batch))
            one = subject.put(x, kind)
            for spec in specs:
                one = fused(one, spec, ctx)
            meant = get(one[: batch.num_tokens])
            # The same slots twice more, with the same keys and values.
            for logits_only in (False, True):
                ctx = Ctx(made.weights, ctx.kv, subject.prepare(batch), logits_only)
                out = get(ops.decoder_layers(subject.put(x, kind), specs, ctx))
                rows = batch.logits_rows if logits_only else np.arange(batch.num_tokens)
                demand(
                    np.array_equal(out[rows], meant[rows]),
                    "decoder_layers gives other bits than decoder_layer one after the other"
                    + (", where only rows of logits are wanted" if logits_only else ""),
                )
            cache.handles = ctx.kv
    demand(len(cache.handles) == LAYERS, "decoder_layers lost a handle")
    return Finding()


def whole_decoder(subject: Subject, dice: Dice, dtype: str, kv_dtype: str) -> Finding:
    """decoder_logits: the bits of embedding, decoder_layers, norm and head one after the other, also in the step
    after, and with rows left out."""
    made = Layer(subject, dice, dtype, 0, dice.random() < 0.5, "silu")
    specs = tuple(dataclasses.replace(made.layer.spec, layer=i) for i in range(LAYERS))
    ops = subject.ops
    if not all(ops.fuses(DECODER_LOGITS, spec) for spec in specs):
        raise NotOffered("decoder_logits is not offered for such layers: the smaller ops run")
    vocab, eps, hidden = 101, 1e-3, made.hidden
    embedding, norm = Embedding(ops, "e", vocab, hidden), RMSNorm(ops, "n", hidden, eps)
    head = Head(ops, "h", embedding, vocab, hidden, tied=False)
    for spec in (*embedding.own_specs(), *norm.own_specs(), *head.own_specs()):
        around = 1.0 if spec.role == "norm" else 0.0
        made.weights[spec.name], _ = subject.pack(
            around + dice.standard_normal(spec.shape) * 0.3, spec, dtype
        )
    decoder = DecoderSpec(specs, embedding.weight, norm.weight, head.weight, eps)
    cache = Cache.drawn(
        subject, dice, dtype, kv_dtype, 24, heads=made.heads, head_size=made.size, longest=400
    )
    for _ in range(2):
        step = draw(dice, cache.plan, "mixed", range(1, 24), min(POSITIONS, 200))
        for past in (*(past for past, _ in history(cache.plan, step.pieces)), step):
            batch = build(cache.plan, past)
            ids = dice.integers(0, vocab, len(batch.token_ids)).astype(np.int32)
            batch = dataclasses.replace(batch, token_ids=ids)
            ctx = Ctx(made.weights, cache.handles, subject.prepare(batch), logits_only=True)
            x = ops.decoder_layers(embedding(ctx.meta.token_ids, ctx), specs, ctx)
            meant = get(head(wanted(norm(x, ctx), ctx.meta), ctx))
            ctx = Ctx(made.weights, ctx.kv, subject.prepare(batch), logits_only=True)
            out = get(ops.decoder_logits(decoder, ctx))
            demand(
                np.array_equal(out, meant),
                "decoder_logits gives other bits than its parts one after the other",
            )
            cache.handles = ctx.kv
    demand(len(cache.handles) == LAYERS, "decoder_logits lost a handle")
    return Finding()


def _run(
    subject: Subject, cache: Cache, made: Layer, step: Any, rows: Array, kind: torch.dtype
) -> torch.Tensor:
    batch = build(cache.plan, step)
    x = np.concatenate([rows, np.ones((len(batch.token_ids) - len(rows), made.hidden))])
    ctx = Ctx(made.weights, cache.handles, subject.prepare(batch))
    assert made.layer.fused is not None
    out = made.layer.fused(subject.put(x, kind), made.layer.spec, ctx)
    cache.handles = ctx.kv
    return out


def cases(subject: Subject, full: bool) -> list[Case]:
    """All cases of this file."""
    made: list[Case] = []
    more = 4 if full else 1

    def add(name: str, aspect: str, count: int, *given: Any) -> None:
        made.extend(
            Case("op", "decoder_layer", name, aspect, i, lambda s, d: whole_layer(s, d, *given))
            for i in range(count * more)
        )

    def add_several(name: str, *given: Any) -> None:
        made.extend(
            Case("op", DECODER_LAYERS, name, "order", i, lambda s, d: several_layers(s, d, *given))
            for i in range(more)
        )

    def add_whole(name: str, *given: Any) -> None:
        made.extend(
            Case("op", DECODER_LOGITS, name, "order", i, lambda s, d: whole_decoder(s, d, *given))
            for i in range(more)
        )

    for dtype, kv_dtype in subject.numbers():
        name = dtype if kv_dtype == dtype else f"{dtype},kv={kv_dtype}"
        add(name, "plain", 3, dtype, kv_dtype, False)
        add(name, "window", 2, dtype, kv_dtype, True)
        add_several(name, dtype, kv_dtype)
        add_whole(name, dtype, kv_dtype)
    return made
