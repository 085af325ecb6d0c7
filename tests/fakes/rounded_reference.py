"""Tokens of the reference backend where logits are rounded to bfloat16, and how others' compare with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from tiny_models import run, tokens_of

from octavo.backends.reference.backend import ReferenceBackend
from octavo.core.config import EngineConfig
from octavo.core.engine import Engine
from octavo.core.entry.wiring import build_engine
from octavo.core.types import Request, SequenceUpdate
from octavo.plugins import ExecutionPlan, Program
from octavo.plugins.manager import Resolved

TIE = 2.0**-4
"""Twice the distance of two neighbours among bfloat16 numbers of 4 to 8, as large as these logits are."""


class Rounded(ReferenceBackend):
    """The reference, whose forward pass gives bfloat16 logits."""

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        if program.kind != "forward":
            return program.fn

        def forward(*given: Any) -> Any:
            out, kv = program.fn(*given)
            return replace(out, logits=out.logits.bfloat16()), kv

        return forward


@dataclass
class Tally:
    """Tokens compared, and sequences that parted from the reference's at a tie."""

    tokens: int = 0
    ties: int = 0

    def __str__(self) -> str:
        return f"{self.tokens} tokens as the reference's, {self.ties} ties went another way"


TALLY = Tally()


def rounded_engine(folder: Path, **options: Any) -> Engine:
    """An engine on the rounded reference, with room for everything at once."""
    values = {"num_kv_blocks": 400, "dtype": "float32", "max_logprobs": -1,
              "max_num_batched_tokens": 2048, "enable_prefix_caching": False}  # fmt: skip
    config = EngineConfig.from_kwargs(model=folder, **{**values, **options})
    return build_engine(config, resolved=Resolved(Rounded(), "reference", "asked for by a test"))


def same_tokens(
    folder: Path,
    requests: Sequence[Request],
    found: Mapping[str, Sequence[SequenceUpdate]],
    **options: Any,
) -> None:
    """Fails unless every sample's tokens are those of the rounded reference. From a tie on, which of two
    tokens follows is open: the rest of the sample is not compared, and the tie is counted."""
    made = rounded_engine(folder, **options)
    asked = [
        msgspec.structs.replace(r, params=msgspec.structs.replace(r.params, logprobs=-1))
        for r in requests
    ]
    wanted = run(made, *asked)
    for request in requests:
        for index in range(request.params.n):
            mine = [u for u in found[request.id] if u.index == index]
            theirs = [u for u in wanted[request.id] if u.index == index]
            _same(request, tokens_of(mine), theirs)
    made.shutdown()


def _same(request: Request, mine: list[int], updates: list[SequenceUpdate]) -> None:
    theirs = tokens_of(updates)
    entries = [entry for u in updates for entry in u.logprobs or ()]
    assert len(mine) == len(theirs), request.id
    for at, (got, expected) in enumerate(zip(mine, theirs, strict=True)):
        if got != expected:
            near = dict(zip(entries[at].top_ids, entries[at].top_logprobs, strict=True))
            gap = near[expected] - near[got]
            # A draw adds noise, so that tokens far apart may tie.
            tied = request.params.temperature > 0 or abs(gap) <= TIE
            assert tied, f"{request.id}: token {at} is {got}, not {expected}, likelier by {gap}"
            TALLY.ties += 1
            return
        TALLY.tokens += 1
