"""Drawing tokens from logits: greedy, or Gumbel-max after temperature, top-k, top-p and min-p.

Nothing is sorted. What a row keeps is all above one number, its cut, and of the tokens equal to it
those of the lowest ids. The cut is found by bisection over the row, until the candidates left fit
registers, and then among them alone. Noise depends on (seed, counter, vocabulary id) only, so a row's
token does not depend on the rest of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from octavo.kernels.triton.numbers import draw_key, gumbel, key_value, order_key
from octavo.kernels.triton.runtime import arch_of, launch
from octavo.kernels.triton.tiles import tile
from octavo.kernels.triton.variants import SHORT, Variant

if TYPE_CHECKING:
    import torch

    from octavo.kernels.triton.tiles import Tile

PART = 8192  # tokens of the vocabulary that one program looks at
ROOM = 2048  # candidates among which the cut is searched in registers
LAST: tl.constexpr = tl.constexpr(0x7FFFFFFF)
LOWEST: tl.constexpr = tl.constexpr(-2139095041)  # the key of minus infinity


@triton.jit
def draws(temperature, top):
    """Whether a row with this largest logit is drawn from. Otherwise its largest logit is taken:
    greedy, a temperature too near 0, or scaled logits without finite maximum."""
    return (
        (temperature > 0)
        & (1.0 / temperature < float("inf"))
        & (tl.abs(top / temperature) < float("inf"))
    )


@triton.jit
def first_of_largest(values, ids):
    """The largest of values and the lowest of its ids."""
    most = tl.max(values, 0)
    return most, tl.min(tl.where(values == most, ids, LAST), 0)


@triton.jit
def best_kernel(logits, best, best_id, vocab, stride, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, part): the part's largest logit and its lowest id; NaN if there is one."""
    row, part = tl.program_id(0), tl.program_id(1)
    start = logits + row.to(tl.int64) * stride
    values = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.full([BLOCK], LAST, tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for first in range(part * PART, tl.minimum((part + 1) * PART, vocab), BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        bad = bad | (x != x).to(tl.int32)
        ids = tl.where(x > values, at, ids)
        values = tl.where(x > values, x, values)
    most, lowest = first_of_largest(values, ids)
    out = row * tl.num_programs(1) + part
    tl.store(best + out, tl.where(tl.max(bad, 0) > 0, float("nan"), most))
    tl.store(best_id + out, lowest)


@triton.jit
def load_best(best, row, parts, PARTS: tl.constexpr):
    """A row's parts' largest numbers [PARTS]; and their maximum, NaN if one is NaN."""
    lane = tl.arange(0, PARTS)
    values = tl.load(best + row * parts + lane, mask=lane < parts, other=float("-inf"))
    bad = tl.max((values != values).to(tl.int32), 0) > 0
    return values, tl.where(bad, float("nan"), tl.max(values, 0))


@triton.jit
def measure(start, vocab, top, inverse, key, BLOCK: tl.constexpr):
    """How many logits have a larger key, and their mass (that of the largest logit is 1)."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        above = order_key(x) > key
        count += above.to(tl.int32)
        mass += tl.where(above, tl.exp((x - top) * inverse), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def probe(start, vocab, top, inverse, keys, BLOCK: tl.constexpr):
    """`measure` for 8 keys at once: counts and masses [8]."""
    count = tl.zeros([BLOCK, 8], tl.int32)
    mass = tl.zeros([BLOCK, 8], tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        above = order_key(x)[:, None] > keys[None, :]
        count += above.to(tl.int32)
        mass += tl.where(above, tl.exp((x - top) * inverse)[:, None], 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def gather(start, vocab, low, high, room, BLOCK: tl.constexpr):
    """Writes the keys in (low, high], in any order, to room."""
    seen = 0
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        key = order_key(x)
        inside = (key > low) & (key <= high)
        rank = tl.cumsum(inside.to(tl.int32), 0)
        tl.store(room + seen + rank - 1, key, mask=inside)
        seen += tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()  # other lanes read what these wrote


@triton.jit
def search(
    start,
    vocab,
    top,
    inverse,
    room,
    low,
    limit,
    BY_MASS: tl.constexpr,
    PROBE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The smallest key above `low` for which what lies above it is less than `limit`: tokens, or that
    share of the mass above `low`.

    Returns that key, how many tokens have it, and how many of them it takes to reach the limit. With
    less than `limit` in all, `low` itself.
    """
    # Logits near the largest matter most: a first look at distances of 2^-1 to 2^6 below it.
    step = tl.arange(0, 8)
    keys = order_key(top - tl.exp2((step - 1).to(tl.float32)) / inverse)
    keys = tl.maximum(tl.where(step == 7, low, keys), low)
    counts, masses = probe(start, vocab, top, inverse, keys, PROBE)
    all_count, all_mass = tl.max(counts, 0), tl.max(masses, 0)
    if BY_MASS:
        limit = limit * all_mass
        under = masses < limit
        enough = all_mass >= limit
    else:
        under = counts < limit
        enough = all_count >= limit
    bottom = low
    high = tl.minimum(tl.min(tl.where(under, keys, LAST), 0), order_key(top))
    low = tl.max(tl.where(under, low, keys), 0)
    high = tl.where(enough, high, bottom)
    low = tl.minimum(low, high)
    count_low = tl.max(tl.where(keys == low, counts, 0), 0)
    count_high = tl.max(tl.where(keys == high, counts, 0), 0)
    mass_high = tl.max(tl.where(keys == high, masses, 0.0), 0)
    while (low + 1 < high) & (count_low - count_high > ROOM):
        middle = (low & high) + ((low ^ high) >> 1)
        count, mass = measure(start, vocab, top, inverse, middle, BLOCK)
        below = mass < limit if BY_MASS else count < limit
        high = tl.where(below, middle, high)
        low = tl.where(below, low, middle)
        count_high = tl.where(below, count, count_high)
        mass_high = tl.where(below, mass, mass_high)
        count_low = tl.where(below, count_low, count)
    if low + 1 < high:
        gather(start, vocab, low, high, room, BLOCK)
        lane = tl.arange(0, ROOM)
        key = tl.load(room + lane, mask=lane < count_low - count_high, other=LOWEST)
        mass_of = tl.exp((key_value(key) - top) * inverse)
        base_count, base_mass = count_high, mass_high
        while low + 1 < high:
            middle = (low & high) + ((low ^ high) >> 1)
            above = key > middle
            count = base_count + tl.sum(above.to(tl.int32), 0)
            mass = base_mass + tl.sum(tl.where(above, mass_of, 0.0), 0)
            below = mass < limit if BY_MASS else count < limit
            high = tl.where(below, middle, high)
            low = tl.where(below, low, middle)
            count_high = tl.where(below, count, count_high)
            mass_high = tl.where(below, mass, mass_high)
            count_low = tl.where(below, count_low, count)
        tl.debug_barrier()  # `room` may be written anew
    equal = count_low - count_high
    needed = equal
    if BY_MASS:
        each = tl.exp((key_value(high) - top) * inverse)
        short = tl.ceil((limit - mass_high) / each)
        needed = tl.maximum(tl.minimum(short, equal.to(tl.float32)), 1.0).to(tl.int32)
    return high, equal, needed


@triton.jit
def id_of(start, vocab, key, rank, BLOCK: tl.constexpr):
    """The id of the rank-th (from 1) token with this key."""
    seen = 0
    found = -1
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        same = ((order_key(x) == key) & (at < vocab)).to(tl.int32)
        here = (same > 0) & (seen + tl.cumsum(same, 0) == rank)
        found = tl.maximum(found, tl.max(tl.where(here, at, -1), 0))
        seen += tl.sum(same, 0)
    return found


@triton.jit
def cut_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    best,
    room,
    cuts,
    last_ids,
    tops,
    vocab,
    stride,
    parts,
    PARTS: tl.constexpr,
    PROBE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Program (row): its cut by top-k and then top-p, the last id that stays of those equal to the
    cut, and its largest logit."""
    row = tl.program_id(0)
    _of_parts, top = load_best(best, row, parts, PARTS)
    tl.store(tops + row, top)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    cut = tl.full([], LOWEST, tl.int32)
    last_id = tl.full([], LAST, tl.int32)
    by_k = (k > 0) & (k < vocab)
    if draws(heat, top) & (by_k | (p < 1.0)):
        start = logits + row.to(tl.int64) * stride
        own_room = room + row * ROOM
        if by_k:
            cut, _equal, _needed = search(
                start, vocab, top, 1.0 / heat, own_room, cut, k, False, PROBE, BLOCK, ROOM
            )
        if p < 1.0:
            low = tl.where(cut > LOWEST, cut - 1, cut)
            cut, equal, needed = search(
                start, vocab, top, 1.0 / heat, own_room, low, p, True, PROBE, BLOCK, ROOM
            )
            if needed < equal:
                last_id = id_of(start, vocab, cut, needed, BLOCK)
    tl.store(cuts + row, key_value(cut))
    tl.store(last_ids + row, last_id)


@triton.jit
def draw_kernel(
    logits,
    temperature,
    min_p,
    seed,
    counter,
    cuts,
    last_ids,
    tops,
    best,
    best_id,
    vocab,
    stride,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): the part's largest logit plus noise among the tokens that stay, and its id."""
    row, part = tl.program_id(0), tl.program_id(1)
    heat, top = tl.load(temperature + row), tl.load(tops + row)
    if draws(heat, top):
        start = logits + row.to(tl.int64) * stride
        cut, last_id = tl.load(cuts + row), tl.load(last_ids + row)
        share = tl.load(min_p + row)
        least = tl.where(share > 0, tl.div_rn(top, heat) + tl.log(share), float("-inf"))
        low, high = draw_key(tl.load(seed + row), tl.load(counter + row))
        values = tl.full([BLOCK], float("-inf"), tl.float32)
        ids = tl.full([BLOCK], LAST, tl.int32)
        for first in range(part * PART, tl.minimum((part + 1) * PART, vocab), BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(start + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            stays = (x > cut) | ((x == cut) & (at <= last_id))
            x = tl.div_rn(x, heat)
            x = tl.where(stays & (x >= least), x + gumbel(at, low, high), float("-inf"))
            ids = tl.where(x > values, at, ids)
            values = tl.where(x > values, x, values)
        most, lowest = first_of_largest(values, ids)
        out = row * tl.num_programs(1) + part
        tl.store(best + out, most)
        tl.store(best_id + out, lowest)


@triton.jit
def pick_kernel(
    best,
    best_id,
    temperature,
    drawn,
    drawn_id,
    tokens,
    parts,
    PARTS: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Program (row): its token, int64; -1 with a NaN or without a token that is allowed."""
    row = tl.program_id(0)
    lane = tl.arange(0, PARTS)
    values, top = load_best(best, row, parts, PARTS)
    ids = tl.load(best_id + row * parts + lane, mask=lane < parts, other=LAST)
    _most, token = first_of_largest(values, ids)
    if not GREEDY:  # noqa: SIM102 - decided when it is compiled
        if draws(tl.load(temperature + row), top):
            values, _top = load_best(drawn, row, parts, PARTS)
            ids = tl.load(drawn_id + row * parts + lane, mask=lane < parts, other=LAST)
            _most, token = first_of_largest(values, ids)
    token = tl.where(top > float("-inf"), token, -1)  # also where top is NaN
    tl.store(tokens + row, token.to(tl.int64))


def vocabulary_tile(logits: torch.Tensor, kernel: str = "sampling") -> Tile:
    """What programs over parts of logits [L, V] are launched with."""
    return tile(kernel, arch_of(logits.device), logits.shape[1], "float32")


def partials(logits: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for a float32 and an int32 of every row and part, [L, parts] each."""
    import torch

    shape = (logits.shape[0], parts)
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int32),
    )


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """logits [L, V], any float dtype -> tokens [L] int64: the lowest id of the largest logit.

    -1 for a row with a NaN, or without a logit above minus infinity.
    """
    return _sample(logits, None)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    counter: torch.Tensor,
) -> torch.Tensor:
    """logits [L, V], any float dtype -> tokens [L] int64; -1 as in `greedy`.

    By row: logits / temperature (0: greedy), then top_k (int32; 0: off), top_p (1: off) and min_p (0:
    off), float32 but top_k; then the largest sum of logit and Gumbel noise from (seed, counter, id),
    int64. Never waits for the device.
    """
    return _sample(logits, (temperature, top_k, top_p, min_p, seed, counter))


def _sample(logits: torch.Tensor, rows: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
    import torch

    count, vocab = logits.shape
    tokens = logits.new_empty(count, dtype=torch.int64)
    parts = triton.cdiv(vocab, PART)
    padded = triton.next_power_of_2(parts)
    shape = vocabulary_tile(logits)
    stride, block = logits.stride(0), shape.block_n
    sizes = {"PART": PART, "BLOCK": block}
    best, best_id = partials(logits, parts)
    launch(best_kernel, (count, parts), logits, best, best_id, vocab, stride, tile=shape, **sizes)
    temperature, drawn, drawn_id = best, best, best_id
    if rows is not None:
        temperature, top_k, top_p, min_p, seed, counter = rows
        drawn, drawn_id = partials(logits, parts)
        room = logits.new_empty((count, ROOM), dtype=torch.int32)
        cuts, last_ids = partials(logits, 1)
        tops = torch.empty_like(cuts)
        cut_shape = vocabulary_tile(logits, "sampling_cut")
        found = (best, room, cuts, last_ids, tops)
        launch(
            cut_kernel,
            (count,),
            *(logits, temperature, top_k, top_p, *found, vocab, stride, parts),
            tile=cut_shape,
            PARTS=padded,
            PROBE=cut_shape.block_m,
            BLOCK=cut_shape.block_n,
            ROOM=ROOM,
        )
        launch(
            draw_kernel,
            (count, parts),
            *(logits, temperature, min_p, seed, counter, cuts, last_ids, tops),
            *(drawn, drawn_id, vocab, stride),
            tile=shape,
            **sizes,
        )
    launch(
        pick_kernel,
        (count,),
        *(best, best_id, temperature, drawn, drawn_id, tokens, parts),
        tile=shape,
        PARTS=padded,
        GREEDY=rows is None,
    )
    return tokens


_TYPES = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "best", "drawn", "cuts", "tops"), "*fp32"),
    **dict.fromkeys(("most", "mass", "logprob", "norm"), "*fp32"),
    **dict.fromkeys(("top_k", "best_id", "drawn_id", "last_ids", "room", "larger"), "*i32"),
    **dict.fromkeys(("seed", "counter", "tokens", "ids", "rank"), "*i64"),
    **dict.fromkeys(("vocab", "stride", "parts"), "i32"),
}


def vocabulary_variant(name: str, kernel: Any, dtype: str = "float32", **fixed: Any) -> Variant:
    """A vocabulary of 128256, as most are a multiple of 16."""
    types = _TYPES | {"logits": f"*{SHORT[dtype]}"}
    sizes = {"PART": PART, "PARTS": triton.next_power_of_2(128256 // PART + 1), "ROOM": ROOM}
    names, table = kernel.arg_names, "sampling_cut" if kernel is cut_kernel else "sampling"
    tiled = {"PROBE": "block_m", "BLOCK": "block_n"}
    return Variant(
        f"{name} {SHORT[dtype]}",
        kernel,
        {arg: types[arg] for arg in names if arg in types},
        {size: value for size, value in sizes.items() if size in names} | fixed,
        tile=lambda arch: tile(table, arch, 128256, "float32"),
        tiled={name: part for name, part in tiled.items() if name in names},
        aligned=tuple(arg for arg in ("vocab", "stride") if arg in names),
    )


AOT: list[Variant] = [
    *(
        vocabulary_variant(name, kernel, dtype)
        for name, kernel in (
            ("sample_best", best_kernel),
            ("sample_cut", cut_kernel),
            ("sample_draw", draw_kernel),
        )
        for dtype in ("float32", "bfloat16")
    ),
    vocabulary_variant("sample_pick", pick_kernel, GREEDY=False),
    vocabulary_variant("sample_pick_greedy", pick_kernel, GREEDY=True),
]
