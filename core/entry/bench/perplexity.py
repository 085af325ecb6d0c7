"""What smaller numbers cost in quality: perplexity of a fixed text, and how distributions move.

A text is cut into windows; the engine gives the log-probability of every token after a window's
first, by the same kernels and KV cache that serve. Each variant is compared with the first one
position by position:

- perplexity: exp of the mean of -log p(token), and its ratio to the first variant's;
- same top token: share of positions at which the most likely token is the same;
- KL: mean over positions of the Kullback-Leibler divergence from the first variant's distribution,
  in nats, with all tokens outside both variants' 64 most likely taken as one. That makes it a lower
  bound (by the data-processing inequality), close where little mass lies outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.config import ConfigError
from octavo.core.engine import Engine, ModelInfo
from octavo.core.entry.bench.stats import columns
from octavo.core.params import SamplingParams
from octavo.core.types import Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEXT = "opticks.txt"
TOP = 64
"""Most likely tokens that are kept of every position."""

FORMULAS = """\
perplexity  exp(mean of -log p(token)); ratio: to the first row's, with the standard error of the
            mean difference of -log p
same top    share of positions whose most likely token is the first row's
KL          mean over positions of sum p log(p / q), p of the first row; tokens outside both rows' 64
            most likely count as one (nats)"""


@dataclass(frozen=True)
class Scores:
    """What an engine says of a text: per scored position the token's log-probability, and the TOP
    most likely tokens with theirs, falling."""

    info: ModelInfo
    logprobs: NDArray[np.float64]  # [P]
    top_ids: NDArray[np.int64]  # [P, TOP]
    top_logprobs: NDArray[np.float64]  # [P, TOP]

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.logprobs.mean()))


@dataclass(frozen=True)
class Row:
    """A variant beside the first one."""

    name: str
    info: ModelInfo
    perplexity: float
    ratio: float
    ratio_error: float
    same_top: float
    kl: float


def default_text() -> str:
    """The committed English text."""
    folder = resources.files("octavo.core.entry.bench") / "data"
    return (folder / TEXT).read_text("utf-8")


def windows(ids: Sequence[int], window: int, total: int) -> list[list[int]]:
    """The first `total` tokens of a text in pieces of `window`; a last one of one token is left out.

    Raises:
        ConfigError: too little text for one position.
    """
    taken = list(ids[:total])
    cut = [taken[at : at + window] for at in range(0, len(taken), window)]
    found = [piece for piece in cut if len(piece) > 1]
    if not found:
        raise ConfigError("the text must have at least two tokens")
    return found


def score(
    engine: Engine, pieces: Iterable[list[int]], on_tokens: Callable[[int], None] | None = None
) -> Scores:
    """Log-probabilities of every token of each piece but its first.

    Raises:
        ConfigError: the engine takes no piece of this length, or fewer log-probabilities than TOP.
        RuntimeError: a request failed.
    """
    info, pieces = engine.info, list(pieces)
    longest = max(map(len, pieces))
    if longest + 1 > info.max_model_len:
        raise ConfigError(
            f"windows of {longest} tokens and one more exceed the engine's {info.max_model_len}; "
            "lower --window"
        )
    top = min(TOP, info.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=top)
    for i, piece in enumerate(pieces):
        engine.add(Request(id=str(i), prompt_token_ids=piece, params=params))
    found: dict[int, list[Any]] = {}
    while engine.has_unfinished():
        for update in engine.step():
            if update.finish_reason == "error":
                raise RuntimeError(f"a window could not be scored: {update.stop_reason}")
            if update.prompt_logprobs is not None:
                found[int(update.request_id)] = update.prompt_logprobs
                if on_tokens is not None:
                    on_tokens(len(update.prompt_logprobs) + 1)
    entries = [entry for i in range(len(pieces)) for entry in found[i]]
    return Scores(
        info,
        np.array([entry.logprob for entry in entries]),
        np.array([entry.top_ids for entry in entries]),
        np.array([entry.top_logprobs for entry in entries]),
    )


def divergence(first: Scores, other: Scores) -> float:
    """Mean KL divergence of `other` from `first` in nats, tokens outside both tops taken as one."""
    total = 0.0
    for p_ids, p_logs, q_ids, q_logs in zip(
        first.top_ids, first.top_logprobs, other.top_ids, other.top_logprobs, strict=True
    ):
        _, at_p, at_q = np.intersect1d(p_ids, q_ids, assume_unique=True, return_indices=True)
        logs_p, logs_q = p_logs[at_p], q_logs[at_q]
        p = np.exp(logs_p)
        total += float((p * (logs_p - logs_q)).sum())
        rest_p, rest_q = 1.0 - p.sum(), 1.0 - np.exp(logs_q).sum()
        if rest_p > 1e-12:
            total += float(rest_p * math.log(rest_p / max(rest_q, 1e-12)))
    return total / len(first.logprobs)


def compare(name: str, first: Scores, other: Scores) -> Row:
    """One variant beside the first."""
    difference = first.logprobs - other.logprobs
    ratio = math.exp(float(difference.mean()))
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference)) if len(difference) > 1 else 0
    return Row(
        name=name,
        info=other.info,
        perplexity=other.perplexity,
        ratio=ratio,
        ratio_error=ratio * error,
        same_top=float((first.top_ids[:, 0] == other.top_ids[:, 0]).mean()),
        kl=divergence(first, other),
    )


def table(rows: Sequence[Row]) -> str:
    """Variants under each other, and the formulas."""
    cells = [("variant", "weights", "MB", "KV", "perplexity", "ratio", "±", "same top", "KL")]
    cells += [
        (
            row.name,
            row.info.numbers,
            f"{row.info.weight_bytes / 1e6:.1f}",
            row.info.kv_dtype,
            f"{row.perplexity:.3f}",
            f"{row.ratio:.4f}",
            f"{row.ratio_error:.4f}",
            f"{row.same_top:.2%}",
            f"{row.kl:.5f}",
        )
        for row in rows
    ]
    return f"{columns(cells)}\n\n{FORMULAS}"
