"""Cases of `Capabilities.batch_invariant`: what shares a step does not change a bit of a row or a sequence.
Asked of backends that declare it.

The backend is started as for --batch-invariant. Rows are long: short sums come in one order in any kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from octavo.core.ops import DTYPES
from octavo.core.params import RequestRefused
from octavo.plugins import WeightSpec
from octavo.plugins.conformance import tiny
from octavo.plugins.conformance.batches import Step, Style, build, draw
from octavo.plugins.conformance.cache_cases import Cache
from octavo.plugins.conformance.case import Case, Dice, Finding, Refused, demand
from octavo.plugins.conformance.engine_cases import Run, ask, plainest, trial
from octavo.plugins.conformance.subject import Subject, rounded

WIDTH = 2048
"""Numbers of a row."""

Rows = Callable[[torch.Tensor], torch.Tensor]
"""x [T, WIDTH] -> [T, n]."""


def _bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().cpu().view(torch.uint8)


def _sizes(subject: Subject, dtype: str) -> list[int]:
    """How many rows a step may have, fewest first."""
    buckets = subject.plan(*subject.beside(dtype)).lanes[0].token_buckets
    return [b for b in buckets if b <= 64] or list(buckets[:2]) or [1, 2, 3, 4, 7, 8, 16, 33, 64]


def _alone(subject: Subject, dice: Dice, dtype: str, what: str, run: Rows) -> Finding:
    """One row among others, in steps of all sizes and at any place in them."""
    kind, sizes = subject.activation(dtype), _sizes(subject, dtype)
    for _ in range(3):
        row, alone = rounded(dice.standard_normal((1, WIDTH)), kind), None
        for size in sizes:
            x = rounded(dice.standard_normal((size, WIDTH)), kind)
            at = int(dice.integers(size))
            x[at] = row
            got = _bits(run(subject.put(x, kind)))[at]
            alone = got if alone is None else alone
            demand(
                torch.equal(got, alone),
                f"batch_invariant is declared, but {what} gives row {at} of {size} other bits than in a "
                f"step of {sizes[0]}",
            )
    return Finding(detail=f"steps of {sizes[0]} to {sizes[-1]} rows")


def multiplies(subject: Subject, dice: Dice, dtype: str, scheme: str | None) -> Finding:
    """linear."""
    spec = WeightSpec("w", "linear", (("w", (48, WIDTH)),), scheme=scheme,
                      group=32 if scheme == "int4" else 0)  # fmt: skip
    values = torch.from_numpy(dice.standard_normal((48, WIDTH))).to(DTYPES[dtype])
    with subject.batch_invariant() as started:
        weight = started.ops.pack_weight({"w": values}, spec, dtype)
        return _alone(started, dice, dtype, "linear", lambda x: started.ops.linear(x, weight))


def norms(subject: Subject, dice: Dice, dtype: str, added: bool) -> Finding:
    """rms_norm, and add_rms_norm, whose residual is the same numbers in another order."""
    spec = WeightSpec("n", "norm", (("n", (WIDTH,)),))
    with subject.batch_invariant() as started:
        ops = started.ops
        weight, _ = started.pack(dice.standard_normal(WIDTH), spec, dtype)

        def add(x: torch.Tensor) -> torch.Tensor:
            return torch.cat(ops.add_rms_norm(x, x.flip(1).contiguous(), weight, 1e-5), dim=1)

        run = add if added else lambda x: ops.rms_norm(x, weight, 1e-5)
        return _alone(started, dice, dtype, "add_rms_norm" if added else "rms_norm", run)


def attends(subject: Subject, dice: Dice, dtype: str, kv_dtype: str, style: Style) -> Finding:
    """paged_attention of each of a step's sequences alone, and of all of them."""
    longest = subject.size(1000, 200)
    with subject.batch_invariant() as started:
        heads, size = started.heads(dice), started.head_size(dice)
        block_size = started.block_size(dice)
        cache = Cache.drawn(
            started, dice, dtype, kv_dtype, 2 * (-(-longest // block_size) + 24), heads=heads,
            head_size=size, block_size=block_size, longest=longest,
        )  # fmt: skip
        step = draw(dice, cache.plan, style, range(1, cache.num_blocks), longest)
        kind = started.activation(dtype)
        contents = cache.contents(dice, step, kind)
        queries = [
            rounded(dice.standard_normal((p.count, heads[0], size)), kind) for p in step.pieces
        ]

        def run(some: list[int]) -> torch.Tensor:
            part = Step(step.lane, tuple(step.pieces[i] for i in some))
            meta = cache.write_last(part, [contents[i] for i in some], kind)
            q = np.full((len(build(cache.plan, part).token_ids), heads[0], size), 99.0)
            mine = np.concatenate([queries[i] for i in some])
            q[: len(mine)] = mine
            out = started.ops.paged_attention(
                started.put(q, kind), cache.handles[0], meta, scale=size**-0.5
            )
            return _bits(out[: len(mine)])

        together, at = run(list(range(len(step.pieces)))), 0
        for i, piece in enumerate(step.pieces):
            demand(
                torch.equal(run([i]), together[at : at + piece.count]),
                f"batch_invariant is declared, but paged_attention gives {piece.count} of "
                f"{piece.context} tokens other bits alone than beside {len(step.pieces) - 1} sequences",
            )
            at += piece.count
    return Finding(detail=f"{len(step.pieces)} sequences")


def company(subject: Subject, dice: Dice, dtype: str, scheme: str | None) -> Finding:
    """With --batch-invariant, log-probabilities have the same bits alone, beside others, and in chunks."""
    options = {"batch_invariant": True, "enable_prefix_caching": False, "quantization": scheme}
    longest = subject.size(70, 40)
    requests = [
        ask(f"r{i}", tiny.prompt(dice, length), subject.size(6, 3), logprobs=1)
        for i, length in enumerate((longest, 3, 17, 33, 1, 29)[: subject.size(6, 3)])
    ]
    try:
        # Wide enough that one row alone would be summed in another order.
        with (
            subject.batch_invariant(),
            trial(
                subject, dice, "grouped-heads", subject.beside(dtype), intermediate_size=1024
            ) as t,
        ):
            with t.engine(**options) as made:
                alone = [_told(Run().go(made, [r]))[r.id] for r in requests]
                together = _told(Run().go(made, requests))
            with t.engine(**options, max_num_batched_tokens=32) as made:
                chunked = _told(Run().go(made, requests))
    except RequestRefused as refused:  # a device's lanes may be too small for it
        raise Refused(str(refused)) from refused
    for request, wanted in zip(requests, alone, strict=True):
        for found, how in ((together, "beside others"), (chunked, "in chunks beside others")):
            demand(
                found[request.id] == wanted,
                f"batch_invariant is declared, but {how} request {request.id} has other "
                "log-probabilities than alone",
            )
    return Finding(detail=f"{len(requests)} requests")


def _told(run: Run) -> dict[str, list[tuple[int, str]]]:
    """Each request's tokens and their log-probabilities, as hexadecimal so that every bit counts."""
    found: dict[str, list[tuple[int, str]]] = {}
    for update in run.updates:
        for entry in update.logprobs or ():
            pair = (entry.token_id, entry.logprob.hex())
            found.setdefault(update.request_id, []).append(pair)
    return found


def cases(subject: Subject, full: bool) -> list[Case]:
    """All cases of this file; none for a backend that does not declare it."""
    made: list[Case] = []
    if not subject.capabilities.batch_invariant:
        return made

    def add(op: str, name: str, count: int, body: Any, *given: Any) -> None:
        number = sum((c.op, c.dtype) == (op, name) for c in made)
        made.extend(
            Case("op", op, name, "batch-invariant", number + i, lambda s, d: body(s, d, *given))
            for i in range(count * (4 if full else 1))
        )

    for dtype in subject.dtypes:
        add("linear", dtype, 1, multiplies, dtype, None)
        add("rms_norm", dtype, 1, norms, dtype, False)
        add("add_rms_norm", dtype, 1, norms, dtype, True)
    for scheme in subject.capabilities.quantization:
        dtype = subject.dtypes[0]
        add("linear", f"{scheme} over {dtype}".replace(" ", "-"), 1, multiplies, dtype, scheme)
    for dtype, kv_dtype in subject.numbers():
        name = dtype if kv_dtype == dtype else f"{dtype},kv={kv_dtype}"
        styles: tuple[Style, ...] = ("mixed", "long")
        for style in styles:
            add("paged_attention", name, 1, attends, dtype, kv_dtype, style)
    for dtype in subject.dtypes:
        made.append(_engine(dtype, "grouped-heads", dtype, None))
    plain, _ = plainest(subject)
    for scheme in subject.capabilities.quantization:
        made.append(_engine(f"{scheme}-over-{plain}", "", plain, scheme))
    return made


def _engine(numbers: str, aspect: str, dtype: str, scheme: str | None) -> Case:
    def body(subject: Subject, dice: Dice) -> Finding:
        return company(subject, dice, dtype, scheme)

    return Case("engine", "batch-invariant", numbers, aspect, 0, body)
