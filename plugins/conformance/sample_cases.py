"""Cases of drawing tokens, and of their log-probabilities."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from octavo.core.contract import SampleInputs
from octavo.core.types import Int64
from octavo.plugins.conformance import truth
from octavo.plugins.conformance.batches import logits_rows_of
from octavo.plugins.conformance.case import (
    Case,
    Dice,
    Failed,
    Finding,
    demand,
    within,
)
from octavo.plugins.conformance.subject import Subject, get, rounded
from octavo.plugins.conformance.tolerance import distance
from octavo.plugins.conformance.truth import Array

NEAR = 1e-4
"""Draws whose scores are nearer than this, and filters whose bounds are, may go either way in float32."""

Z = 4.7534
"""The normal quantile of 1 - 1e-6: how unlikely a chi-square must be to fail."""


def _rows(subject: Subject, wanted: int) -> int:
    plan = subject.plan(*subject.beside(subject.dtypes[0]))
    return logits_rows_of(plan, min(wanted, plan.max_logits_rows))


def _sample(subject: Subject, logits: Array, **values: Any) -> list[int]:
    """The backend's tokens for logits [L, V], padded to what a step of its plan holds."""
    count = len(logits)
    found: list[int] = []
    size = _rows(subject, count)
    for at in range(0, count, size):
        part = logits[at : at + size]
        pad = size - len(part) if size > len(part) and size == _rows(subject, len(part)) else 0
        found += _draw(subject, part, pad, {n: v[at : at + size] for n, v in values.items()})
    return found


def _draw(subject: Subject, logits: Array, pad: int, values: dict[str, Any]) -> list[int]:
    off: dict[str, tuple[Any, float]] = {
        "temperature": (np.float32, 0), "top_k": (np.int32, 0), "top_p": (np.float32, 1),
        "min_p": (np.float32, 0), "seed": (np.int64, 0), "counter": (np.int64, 0),
    }  # fmt: skip
    tensors = {}
    for name, (kind, idle) in off.items():
        column = np.asarray(values.get(name, [idle] * len(logits)), kind)
        column = np.concatenate([column, np.full(pad, idle, kind)])
        tensors[name] = torch.from_numpy(column).to(subject.torch_device)
    greedy = "temperature" not in values
    rows = SampleInputs(**tensors, all_greedy=greedy)
    padded = np.concatenate([logits, np.zeros((pad, logits.shape[1]))])
    # A copy each time: an op may work in place.
    out = subject.ops.sample(subject.put(padded, torch.float32).clone(), rows)
    demand(len(out) == len(padded), f"sample gave {tuple(out.shape)} for {len(padded)} rows")
    return [int(t) for t in out.cpu()[: len(logits)]]


def _logits(dice: Dice, rows: int, vocab: int) -> Array:
    return rounded(dice.standard_normal((rows, vocab)) * 3, torch.float32)


def greedy(subject: Subject, dice: Dice) -> Finding:
    """The most likely token of each row; -1 where no token is allowed or a logit is NaN."""
    logits = _logits(dice, 8, int(dice.choice([11, 101, 997, 4099])))
    best = logits.argmax(-1)
    logits[2, :] = -np.inf
    logits[3, int(dice.integers(logits.shape[1]))] = np.nan
    logits[4, : logits.shape[1] // 2] = -np.inf
    best[4] = logits[4].argmax()
    best[2] = best[3] = -1
    if subject.ops.draws_finite:
        logits[5, int(dice.integers(logits.shape[1]))] = np.inf
        best[5] = -1
    got = _sample(subject, logits)
    demand(got == best.tolist(), f"greedy gave {got}, the most likely are {best.tolist()}")
    return Finding()


def seeded(subject: Subject, dice: Dice, aspect: str) -> Finding:
    """Draws with top-k, top-p and min-p: the tokens that (seed, counter, vocabulary id) fix. Of tokens that
    tie with the last one kept, top-k keeps all, top-p those with the lowest ids."""
    rows, vocab = subject.size(16, 6), int(dice.choice([64, 101, 997]))
    logits = _logits(dice, rows, vocab)
    temperatures = [0.3, 1.0, 1.7]
    if aspect == "ties":  # of halves, which these temperatures leave as equal as they were
        logits, temperatures = np.round(logits) / 2, [0.5, 1.0, 2.0]
    values: dict[str, Any] = {
        "temperature": dice.choice(temperatures, rows).astype(np.float32),
        "seed": dice.integers(-(2**62), 2**62, rows),
        "counter": dice.integers(0, 5000, rows),
    }
    options: dict[str, list[float]] = {
        "top_k": [1, 5, 50, 2 * vocab], "top_p": [0.1, 0.5, 0.9], "min_p": [0.02, 0.2],
    }  # fmt: skip
    several = {"together": ("top_k", "top_p", "min_p"), "ties": ("top_k", "top_p")}
    wanted = several.get(aspect, (aspect,))
    for name in wanted:
        if name in options:
            kind = np.int32 if name == "top_k" else np.float32
            values[name] = dice.choice(options[name], rows).astype(kind)
    got, again = _sample(subject, logits, **values), _sample(subject, logits, **values)
    exact = subject.capabilities.seeded_sampling
    if exact:
        demand(got == again, f"the same seeds gave {got}, then {again}")
    for i, token in enumerate(got):
        _check_draw(logits[i], {n: v[i] for n, v in values.items()}, token, exact)
    return Finding(detail="" if exact else "draws are the device's own (seeded_sampling=False)")


def _check_draw(row: Array, values: dict[str, Any], token: int, exact: bool) -> None:
    """Raises Failed unless this token may have been drawn, and was when `exact`."""
    scaled = row / float(values["temperature"])
    top_k, top_p = int(values.get("top_k", 0)), float(values.get("top_p", 1.0))
    min_p = float(values.get("min_p", 0.0))
    keeps = [truth.kept(scaled, top_k, min(1.0, top_p + d) if top_p < 1 else 1.0, min_p * (1 - d))
             for d in (-1e-5, 0.0, 1e-5)]  # fmt: skip
    loose = keeps[0] | keeps[1] | keeps[2]
    demand(0 <= token < len(row), f"token {token} of a vocabulary of {len(row)}")
    asked = f"top_k {top_k}, top_p {top_p:.3g}, min_p {min_p:.3g}"
    demand(bool(loose[token]), f"token {token} was drawn, which {asked} leaves out")
    if not exact:
        return
    score = scaled + truth.gumbel(int(values["seed"]), int(values["counter"]), len(row))
    if not any(score[token] >= score[keep].max() - NEAR for keep in keeps):
        best = int(np.where(keeps[1], score, -np.inf).argmax())
        raise Failed(f"seed and counter fix token {best} ({asked}), {token} was drawn")


def distribution(subject: Subject, dice: Dice) -> Finding:
    """Many draws from one row have its softmax: a chi-square test that fails once in a million."""
    draws, vocab = subject.size(2048, 512), 12
    row = rounded(dice.standard_normal(vocab), torch.float32)
    got = np.array(
        _sample(
            subject,
            np.tile(row, (draws, 1)),
            temperature=np.ones(draws, np.float32),
            seed=np.full(draws, int(dice.integers(2**40))),
            counter=np.arange(draws),
        )
    )
    demand(bool(((got >= 0) & (got < vocab)).all()), "a token outside the vocabulary")
    expected = np.exp(row) / np.exp(row).sum() * draws
    chi = float(((np.bincount(got, minlength=vocab) - expected) ** 2 / expected).sum())
    free = vocab - 1
    bound = (
        free * (1 - 2 / (9 * free) + Z * math.sqrt(2 / (9 * free))) ** 3
    )  # Wilson and Hilferty 1931
    return within("chi-square of draws", chi, bound)


def _masked(
    subject: Subject, dice: Dice, aspect: str
) -> tuple[Array, Int64, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [L, V] as they are when all is done exactly, and the named rows; then what an op is given: the
    logits, those rows, and the words of their masks."""
    rows, vocab = _rows(subject, 12), int(dice.choice([5, 31, 33, 101, 997, 4099]))
    if aspect == "whole-words":
        vocab = int(dice.choice([32, 64, 4096]))
    count = rows if aspect == "every-row" else int(dice.integers(1, rows + 1))
    named = dice.permutation(rows)[:count]
    words = dice.integers(0, 1 << 32, (count, -(-vocab // 32)), dtype=np.uint32)
    if aspect == "blank":  # as a rule words are of one kind
        words = np.where(dice.random(words.shape) < 0.5, np.uint32(0), np.uint32(0xFFFFFFFF))
        words[0], words[-1] = 0, 0xFFFFFFFF
    logits = _logits(dice, rows, vocab)
    logits[dice.random(logits.shape) < 0.1] = -np.inf
    logits[0, 0] = 0.0
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    exact = logits.copy()
    exact[named] = np.where(allowed == 1, logits[named], -np.inf)
    # The logits of a device of static shapes are changed on the host.
    where = "cpu" if subject.capabilities.shapes == "static" else subject.torch_device
    given = torch.from_numpy(logits).float().to(where)
    index = torch.from_numpy(named.astype(np.int64)).to(where)
    return exact, named, given, index, torch.from_numpy(words.view(np.int32)).to(where)


def masks(subject: Subject, dice: Dice, aspect: str) -> Finding:
    """mask_logits: of the named rows the tokens whose bit is 0 become minus infinity; all else stays, bit by
    bit, and bits behind the vocabulary mean nothing."""
    exact, named, given, rows, words = _masked(subject, dice, aspect)
    subject.ops.mask_logits(given, rows, words)
    wrong = get(given) != exact
    at = tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.any() else ()
    shape = f"{exact.shape[0]} x {exact.shape[1]}"
    demand(
        not at,
        f"row, token {at} of {shape} is wrong after masking rows {sorted(map(int, named))}",
    )
    return Finding()


def allowed(subject: Subject, dice: Dice, aspect: str) -> Finding:
    """best_allowed: of the named rows the most likely token whose bit is 1, -1 if none is; the logits stay."""
    exact, named, given, rows, words = _masked(subject, dice, aspect)
    before = given.clone()
    got = subject.ops.best_allowed(given, rows, words).cpu().tolist()
    best = [int(row.argmax()) if row.max() > -np.inf else -1 for row in exact[named]]
    demand(got == best, f"{got} for {best}, the best that masks of rows {named.tolist()} leave")
    demand(torch.equal(given, before), "the logits were changed")
    return Finding()


def logprobs(subject: Subject, dice: Dice) -> Finding:
    """token_logprobs: log-softmax, rank and logsumexp of raw logits."""
    rows, vocab = _rows(subject, 12), int(dice.choice([11, 997, 4099]))
    logits = _logits(dice, rows, vocab)
    logits[rows // 2, ::2] = -np.inf
    ids = dice.integers(0, vocab, rows)
    ids[rows // 2] = 1
    ids[0] = logits[0].argmax()
    logits[-1, :4] = logits[-1, ids[-1]]  # equal ones do not count against the rank
    got = subject.ops.token_logprobs(subject.put(logits, torch.float32), subject.ids(ids))
    exact = truth.logprobs(logits, ids)
    ranks = got[1].cpu().tolist()
    demand(ranks == exact[1].tolist(), f"ranks {ranks} for {exact[1].tolist()}")
    error = max(distance(get(got[0]), exact[0]), distance(get(got[2]), exact[2]))
    return within("token_logprobs", error, 1e-5)


def cases(subject: Subject, full: bool) -> list[Case]:
    """All cases of this file."""
    more = 4 if full else 1
    made = [Case("op", "sample", "float32", "greedy", i, greedy) for i in range(3 * more)]
    for aspect in ("plain", "top_k", "top_p", "min_p", "together", "ties"):
        made += [
            Case("op", "sample", "float32", aspect, i, partial(seeded, aspect=aspect))
            for i in range(2 * more)
        ]
    made += [Case("op", "sample", "float32", "chi-square", i, distribution) for i in range(more)]
    made += [
        Case("op", "mask_logits", "float32", aspect, i, partial(masks, aspect=aspect))
        for aspect in ("random", "every-row", "whole-words", "blank")
        for i in range(2 * more)
    ]
    made += [
        Case("op", "best_allowed", "float32", aspect, i, partial(allowed, aspect=aspect))
        for aspect in ("random", "whole-words", "blank")
        for i in range(2 * more)
    ]
    made += [Case("op", "token_logprobs", "float32", "", i, logprobs) for i in range(4 * more)]
    return made
