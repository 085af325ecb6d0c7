"""Cases of the KV cache and of attention over it.

A cache's layout is its backend's own, so these look at it through what the contract offers: whole blocks as
bytes, and attention. All blocks are first filled with bytes 0xFF, which are NaN in every float format:
whoever reads what was not written gives NaN. Block 0 is left out of comparisons: padding points at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from octavo.core.contract import handle_of
from octavo.core.ops import DTYPES
from octavo.core.warm_up import example_batches
from octavo.plugins import ExecutionPlan, Handle, KVSpec
from octavo.plugins.conformance import truth
from octavo.plugins.conformance.batches import (
    Piece,
    Step,
    Style,
    build,
    draw,
    history,
    padded,
    slots_of,
)
from octavo.plugins.conformance.case import Case, Dice, Failed, Finding, demand, within
from octavo.plugins.conformance.subject import (
    Subject,
    get,
    host_bytes,
    rounded,
    strided,
)
from octavo.plugins.conformance.tolerance import (
    KV_RMS_TOLERANCE,
    KV_TOLERANCE,
    TOLERANCE,
    distance,
    rms_distance,
)
from octavo.plugins.conformance.truth import Array

POISON = 0xFF
LAYERS = 2


@dataclass(slots=True)
class Cache:
    """A backend's cache of `LAYERS` layers; only the handles that an op returned last are ever used."""

    subject: Subject
    plan: ExecutionPlan
    spec: KVSpec
    num_blocks: int
    handles: list[Handle]

    @classmethod
    def drawn(
        cls, subject: Subject, dice: Dice, dtype: str, kv_dtype: str, num_blocks: int, *,
        heads: tuple[int, int], head_size: int, block_size: int | None = None, longest: int = 512,
    ) -> Cache:  # fmt: skip
        """An allocated, poisoned cache of a plan that the backend makes for these sizes."""
        plan = subject.plan(
            dtype, kv_dtype, heads=heads, head_size=head_size, longest=longest,
            block_size=subject.block_size(dice) if block_size is None else block_size,
        )  # fmt: skip
        spec = KVSpec(tuple(range(LAYERS)), heads[1], head_size, head_size, plan.kv_dtype)
        handles = subject.ops.alloc_kv([spec], num_blocks, plan.block_size)
        _handle("alloc_kv", handles)
        demand(len(handles) == LAYERS, f"alloc_kv gave {len(handles)} handles for {LAYERS} layers")
        made = cls(subject, plan, spec, num_blocks, handles)
        made.fill(range(num_blocks))
        return made

    def fill(self, blocks: Any) -> None:
        """Bytes 0xFF in these blocks of all layers."""
        ids = list(blocks)
        width = self.bytes([0]).shape[1]
        poison = torch.full((len(ids), width), POISON, dtype=torch.uint8)
        self.put(poison, ids)

    def put(self, data: torch.Tensor, ids: list[int]) -> None:
        """Blocks of all layers from bytes [blocks, bytes]."""
        found = self.subject.ops.import_blocks(data, self.handles, ids)
        self.handles = _handle("import_blocks", found)

    def bytes(self, blocks: Any) -> torch.Tensor:
        """[blocks, bytes] uint8: a copy of these blocks of all layers."""
        return host_bytes(self.subject.ops.export_blocks(self.handles, list(blocks))).clone()

    def all_bytes(self) -> torch.Tensor:
        return self.bytes(range(self.num_blocks))

    def write(self, step: Step, k: Array, v: Array, dtype: torch.dtype, layer: int = 0) -> Any:
        """Writes rows k, v [tokens, Hkv, D] at a step's slots, as columns of one tensor with garbage in
        the rows of padding. Returns the step's inputs."""
        batch = build(self.plan, step)
        rows = len(batch.token_ids)
        both = np.full((rows, 2 * k.shape[1], k.shape[2]), 99.0)
        both[: len(k)] = np.concatenate([k, v], axis=1)
        keys, values = strided(self.subject.put(both, dtype), [k.shape[1], v.shape[1]])
        meta = self.subject.prepare(batch)
        found = self.subject.ops.write_kv(self.handles[layer], keys, values, meta)
        self.handles[layer] = _handle("write_kv", found)
        return meta

    def contents(self, dice: Dice, step: Step, dtype: torch.dtype) -> list[Array]:
        """Keys and values [2, context, Hkv, D] of each piece of a step; those before the step are written."""
        shape = (self.spec.kv_heads, self.spec.head_size)
        made = [rounded(dice.standard_normal((2, p.context, *shape)), dtype) for p in step.pieces]
        for past, (i,) in history(self.plan, step.pieces):
            piece = past.pieces[0]
            part = slice(piece.start, piece.context)
            self.write(past, made[i][0][part], made[i][1][part], dtype)
        return made

    def write_last(self, step: Step, contents: Sequence[Array], dtype: torch.dtype) -> Any:
        """Writes what a step itself brings of its pieces' `contents`. Returns the step's inputs."""
        fresh = [c[:, p.start :] for c, p in zip(contents, step.pieces, strict=True)]
        k, v = np.concatenate(fresh, axis=1)
        return self.write(step, k, v, dtype)


def _handle(op: str, found: Any) -> Any:
    try:
        return handle_of(op, found)
    except TypeError as error:
        raise Failed(str(error)) from error


def _close(
    got: torch.Tensor, wanted: torch.Tensor, what: str, names: list[int] | None = None
) -> None:
    same = (got == wanted).all(1)
    if not bool(same.all()):
        bad = [names[int(i)] if names else int(i) for i in torch.nonzero(~same)[:4, 0]]
        raise Failed(f"{what}: the bytes of blocks {bad} are not what they must be")


# --------------------------------------------------------------------------------------- the cache


def blocks_as_bytes(subject: Subject, dice: Dice, dtype: str, kv_dtype: str) -> Finding:
    """Blocks go out and in unchanged, to other places too, and nothing else moves."""
    heads = subject.heads(dice)
    cache = Cache.drawn(
        subject, dice, dtype, kv_dtype, 12, heads=heads, head_size=subject.head_size(dice)
    )
    width = cache.bytes([0]).shape[1]
    claimed = LAYERS * subject.ops.kv_block_bytes(cache.spec, cache.plan.block_size)
    demand(
        0 < width <= claimed,
        f"a block of {LAYERS} layers is {width} bytes, kv_block_bytes says {claimed}",
    )
    # Small whole numbers: bytes that are finite numbers in every format.
    data = torch.from_numpy(dice.integers(0, 60, (3, width), dtype=np.uint8))
    before = cache.all_bytes()
    ids = [int(i) for i in dice.permutation(np.arange(1, 12))[:3]]
    cache.put(data, ids)
    after = cache.all_bytes()
    wanted = before.clone()
    wanted[ids] = data
    _close(after[1:], wanted[1:], "import_blocks")
    _close(cache.bytes(ids[::-1]), data.flip(0), "export_blocks in another order")
    return Finding(0.0, 0.0)


def copies(subject: Subject, dice: Dice, dtype: str, kv_dtype: str) -> Finding:
    """copy_blocks copies in every layer, in order, and touches nothing else."""
    cache = Cache.drawn(
        subject, dice, dtype, kv_dtype, 12, heads=(4, 2), head_size=subject.head_size(dice)
    )
    width = cache.bytes([0]).shape[1]
    data = torch.from_numpy(dice.integers(0, 60, (11, width), dtype=np.uint8))
    cache.put(data, list(range(1, 12)))
    wanted = cache.all_bytes()
    order = [int(i) for i in dice.permutation(np.arange(1, 12))]
    # One source twice, and a chain: the second copy reads what the first has written.
    pairs = [(order[0], order[1]), (order[0], order[2]), (order[2], order[3]), (order[4], order[5])]
    cache.handles = _handle("copy_blocks", subject.ops.copy_blocks(cache.handles, pairs))
    for source, target in pairs:
        wanted[target] = wanted[source]
    _close(cache.all_bytes()[1:], wanted[1:], f"copy_blocks of {pairs}")
    return Finding(0.0, 0.0)


def writes_stay(subject: Subject, dice: Dice, dtype: str, kv_dtype: str) -> Finding:
    """write_kv changes the named slots and nothing else: not other blocks or layers, nor other slots of
    the same blocks, and no slot of a padding row. A block whose first slot is named begins anew: what stands
    behind its last named slot belongs to no sequence, and may be cleared."""
    heads, size = subject.heads(dice), subject.head_size(dice)
    cache = Cache.drawn(subject, dice, dtype, kv_dtype, 24, heads=heads, head_size=size)
    cache.plan = padded(cache.plan, subject.capabilities.shapes == "dynamic", dice)
    step = draw(dice, cache.plan, "mixed", range(1, 24), 4 * cache.plan.block_size)
    kind = subject.activation(dtype)
    shape = (sum(p.count for p in step.pieces), heads[1], size)
    # Every slot of its blocks has numbers; then the step writes over some of them.
    bs = cache.plan.block_size
    base = {b: dice.standard_normal((2, bs, *shape[1:])) for p in step.pieces for b in p.blocks}
    _fill_blocks(cache, base, kind)
    before = cache.all_bytes()
    k, v = dice.standard_normal((2, *shape))
    cache.write(step, k, v, kind)
    after = cache.all_bytes()
    slots = slots_of(build(cache.plan, step))
    touched = sorted({int(s) // bs for s in slots})
    others = [b for b in range(1, 24) if b not in touched]
    _close(after[others], before[others], f"write_kv to slots of blocks {touched}, other blocks")
    # The same state reached by writing whole blocks, the new rows among the old ones.
    for row, slot in enumerate(slots):
        base[int(slot) // bs][:, int(slot) % bs] = k[row], v[row]
    _fill_blocks(cache, base, kind)
    wanted = cache.bytes(touched)
    changed = [
        b
        for b, old, new in zip(touched, wanted, after[touched], strict=True)
        if bool((old != new).any())
    ]
    begun = [b for b in changed if b * bs in slots]
    if begun:
        cache.put(after[touched], touched)
        for block in begun:
            last = max(int(s) % bs for s in slots if int(s) // bs == block)
            _write_behind(cache, block, last, base[block], kind)
        after[touched] = cache.bytes(touched)
    _close(after[touched], wanted, "write_kv, against the same rows in whole blocks", touched)
    return Finding(
        0.0, 0.0, "what stands behind a block's first tokens is cleared" if begun else ""
    )


def padding_alone(subject: Subject, dice: Dice, dtype: str, kv_dtype: str) -> Finding:
    """A batch of nothing but padding, as at warm-up, writes nothing."""
    cache = Cache.drawn(
        subject, dice, dtype, kv_dtype, 12, heads=(4, 2), head_size=subject.head_size(dice)
    )
    before = cache.all_bytes()
    kind = subject.activation(dtype)
    for batch in islice(example_batches(cache.plan.lanes), 4):
        rows = np.full((len(batch.token_ids), 2, cache.spec.head_size), 99.0)
        k, v = subject.put(rows, kind), subject.put(rows, kind)
        meta = subject.prepare(batch)
        cache.handles[0] = _handle("write_kv", subject.ops.write_kv(cache.handles[0], k, v, meta))
    _close(cache.all_bytes()[1:], before[1:], "write_kv of padding")
    return Finding(0.0, 0.0)


def _write_behind(cache: Cache, block: int, last: int, content: Array, kind: torch.dtype) -> None:
    """Writes what stands behind a block's slot `last`, a token at a time, as decoding does."""
    lanes = cache.plan.lanes
    number = next((i for i, x in enumerate(lanes) if set(x.kinds) & {"mixed", "decode"}), 0)
    k, v = content
    for at in range(last + 1, cache.plan.block_size):
        step = Step(number, (Piece(at, 1, (block,)),))
        cache.write(step, k[at : at + 1], v[at : at + 1], kind)


def _fill_blocks(cache: Cache, content: dict[int, Array], kind: torch.dtype) -> None:
    """Writes whole blocks, each as a prompt of its own, as far as a step holds them."""
    size = cache.plan.block_size
    for block, (k, v) in content.items():
        for step, _ in history(cache.plan, [Piece(size, 0, (block,))]):
            piece = step.pieces[0]
            part = slice(piece.start, piece.context)
            cache.write(step, k[part], v[part], kind)


def reads_back(subject: Subject, dice: Dice, dtype: str, kv_dtype: str) -> Finding:
    """What is written comes back: over a context of one token attention gives that token's value."""
    heads, size = (4, 4), subject.head_size(dice)  # no sharing of heads: that is attention's affair
    cache = Cache.drawn(subject, dice, dtype, kv_dtype, 12, heads=heads, head_size=size)
    lane = next(
        (i for i, x in enumerate(cache.plan.lanes) if set(x.kinds) & {"mixed", "prefill"}), 0
    )
    block = int(dice.integers(1, 12))
    step = Step(lane, (Piece(0, 1, (block,)),))
    kind = subject.activation(dtype)
    old = dice.standard_normal((2, cache.plan.block_size, heads[1], size))
    _fill_blocks(cache, {block: old}, kind)  # nor is there anything unwritten to stumble over
    k, v = rounded(dice.standard_normal((2, 1, heads[1], size)), kind)
    meta = cache.write(step, k, v, kind)
    rows = len(build(cache.plan, step).token_ids)
    q = subject.put(dice.standard_normal((rows, heads[0], size)), kind)
    out = subject.ops.paged_attention(q, cache.handles[0], meta, scale=size**-0.5)
    error = distance(get(out[:1]), _stored(v, kv_dtype))
    return within("a value read back", error, _tolerance(subject, dtype, kv_dtype))


def _stored(values: Array, kv_dtype: str) -> Array:
    """Numbers as a cache of this dtype holds them, where the dtype alone says so."""
    return rounded(values, DTYPES[kv_dtype]) if kv_dtype in DTYPES else values


def _tolerance(subject: Subject, dtype: str, kv_dtype: str) -> float:
    own = TOLERANCE[subject.tolerance_word(dtype)]
    for start, bound in KV_TOLERANCE.items():
        if kv_dtype.startswith(start):
            return max(own, bound)
    return own


# --------------------------------------------------------------------------------------- attention


def attends(subject: Subject, dice: Dice, dtype: str, kv_dtype: str, aspect: str) -> Finding:
    """paged_attention over ragged pieces, against float64."""
    heads, size = subject.heads(dice), subject.head_size(dice)
    longest = subject.size(2000, 300) if aspect == "long" else 512
    usual = subject.size(48, 24)
    cache = Cache.drawn(
        subject, dice, dtype, kv_dtype, usual, heads=heads, head_size=size, longest=longest
    )
    bs = cache.plan.block_size
    blocks = max(usual, 2 * (-(-longest // bs) + 8)) if aspect == "long" else usual
    if blocks > usual:
        handles = subject.ops.alloc_kv([cache.spec], blocks, bs)
        cache = replace(cache, num_blocks=blocks, handles=handles)
        cache.fill(range(blocks))
    cache.plan = padded(cache.plan, subject.capabilities.shapes == "dynamic", dice)
    styles: dict[str, Style] = {
        "decode": "decode", "prefill": "prefill", "one": "single", "long": "long",
    }  # fmt: skip
    # Every second block: a write that goes on into the next one is for the checks of write_kv to find.
    step = draw(dice, cache.plan, styles.get(aspect, "mixed"), range(1, blocks - 1, 2), longest)
    kind = subject.activation(dtype)
    contents = cache.contents(dice, step, kind)
    meta = cache.write_last(step, contents, kind)
    rows = len(build(cache.plan, step).token_ids)
    q_values = rounded(dice.standard_normal((rows, heads[0], size)), kind)
    # Queries as they come from the fused projection, with a row stride, or alone.
    wide = np.concatenate([q_values, np.full((rows, 3, size), 99.0)], axis=1)
    q = (
        subject.put(wide, kind)[:, : heads[0]]
        if dice.random() < 0.6
        else subject.put(q_values, kind)
    )
    options: dict[str, Any] = {"scale": size**-0.5 * float(dice.choice([1.0, 0.7]))}
    if aspect == "window":
        options["window"] = int(dice.choice([1, 5, bs, bs + 1, 33]))
    if aspect == "softcap":
        options["softcap"] = float(dice.choice([2.0, 20.0]))
    sinks = rounded(dice.standard_normal(heads[0]), torch.float32) if aspect == "sinks" else None
    out = subject.ops.paged_attention(
        q, cache.handles[0], meta, **options,
        sinks=None if sinks is None else subject.put(sinks, torch.float32),
    )  # fmt: skip
    tokens = sum(p.count for p in step.pieces)
    demand(
        tuple(out.shape) == (rows, heads[0], size),
        f"paged_attention gave {tuple(out.shape)} for q {(rows, heads[0], size)}",
    )
    exact, at = [], 0
    for (k, v), p in zip(contents, step.pieces, strict=True):
        k, v = _stored(k, kv_dtype), _stored(v, kv_dtype)
        exact.append(truth.attention(q_values[at : at + p.count], k, v, **options, sinks=sinks))
        at += p.count
    coarse = next((b for n, b in KV_RMS_TOLERANCE.items() if kv_dtype.startswith(n)), None)
    measure = distance if coarse is None else rms_distance
    error = measure(get(out[:tokens]), np.concatenate(exact))
    where = f"{heads[0]}/{heads[1]} heads of {size}, blocks of {bs}, {options}, " + ", ".join(
        f"{p.count} of {p.context}" for p in step.pieces
    )
    bound = _tolerance(subject, dtype, kv_dtype) if coarse is None else coarse
    return within(f"attention ({where})", error, bound)


ATTENTION = ("mixed", "decode", "prefill", "one", "window", "softcap", "sinks", "long")


def cases(subject: Subject, full: bool) -> list[Case]:
    """All cases of this file."""
    made: list[Case] = []

    def add(op: str, name: str, aspect: str, count: int, body: Any, *given: Any) -> None:
        made.extend(
            Case("op", op, name, aspect, i, lambda s, d: body(s, d, *given))
            for i in range(count * (4 if full else 1))
        )

    for dtype, kv_dtype in subject.numbers():
        name = dtype if kv_dtype == dtype else f"{dtype},kv={kv_dtype}"
        pair = (dtype, kv_dtype)
        add("export_import_blocks", name, "round-trip", 2, blocks_as_bytes, *pair)
        add("copy_blocks", name, "in-order", 2, copies, *pair)
        add("write_kv", name, "slots", 4, writes_stay, *pair)
        add("write_kv", name, "padding", 1, padding_alone, *pair)
        add("write_kv", name, "value", 2, reads_back, *pair)
        for aspect in ATTENTION:
            count = 1 if aspect == "long" else 4
            add("paged_attention", name, aspect, count, attends, *pair, aspect)
    return made
