"""One line of the support matrix: what a backend declares, and what a run of the kit found of it. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from octavo.core.contract import Capabilities
from octavo.plugins.conformance.scorecard import (
    EXECUTIONS,
    Execution,
    Scorecard,
    execution_of,
    remark_of,
)


@dataclass(frozen=True, slots=True)
class SupportRow:
    """A backend on a device. `executions` names the ops that were executed elsewhere than `execution`, and
    `executed_on` what the backend calls that place.

    passed, failed, not_offered: rows of its scorecard; None where there is none.
    """

    backend: str
    device: str
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    quantization: tuple[str, ...]
    block_sizes: str
    head_sizes: str
    shapes: str
    swap: bool
    seeded_sampling: bool
    batch_invariant: bool
    execution: Execution
    executions: Mapping[str, Execution]
    ops: Mapping[str, str]
    passed: int | None = None
    failed: int | None = None
    not_offered: int | None = None
    version: str = ""
    executed_on: str = ""


def of_capabilities(backend: str, device: str, capabilities: Mapping[str, Any]) -> SupportRow:
    """The row of a device by its capabilities as data (`dataclasses.asdict`, or their JSON). What they do
    not tell is as in `Capabilities()`."""
    capabilities = {**asdict(Capabilities()), **capabilities}
    notes, ops = capabilities["notes"], dict(capabilities["ops"])
    try:
        execution = execution_of(notes, "")
        executions = {op: where for op in ops if (where := execution_of(notes, op)) != execution}
    except ValueError:  # the kit says so; a server that runs has nothing to add
        execution, executions = "device", {}
    low, high, step = capabilities["head_sizes"]
    return SupportRow(
        backend=backend,
        device=device,
        dtypes=tuple(capabilities["dtypes"]),
        kv_dtypes=tuple(capabilities["kv_dtypes"]),
        quantization=tuple(capabilities["quantization"]),
        block_sizes=spans(capabilities["block_sizes"]),
        head_sizes=f"{low} to {high}" + (f", multiples of {step}" if step > 1 else ""),
        shapes=capabilities["shapes"],
        swap=capabilities["swap"],
        seeded_sampling=capabilities["seeded_sampling"],
        batch_invariant=capabilities["batch_invariant"],
        execution=execution,
        executions=executions,
        ops=ops,
        executed_on=remark_of(notes),
    )


def of_scorecard(card: Scorecard) -> SupportRow:
    """The row that a run of the kit came to."""
    return replace(
        of_capabilities(card.backend, card.device, card.capabilities),
        passed=card.count("passed"),
        failed=card.count("failed"),
        not_offered=card.count("not offered"),
        version=card.version,
    )


def spans(sizes: Sequence[int]) -> str:
    """`16, 32, … 256` for sizes at equal steps, else all of them."""
    if len(sizes) > 3 and len({b - a for a, b in pairwise(sizes)}) == 1:
        return f"{sizes[0]}, {sizes[1]}, … {sizes[-1]}"
    return ", ".join(map(str, sizes))


# ------------------------------------------------------------------------------------ the page

_INTRO = """# What runs where

Made by `python ci/make_support_matrix.py` from the scorecards in `docs/support/`, which
`octavo backend check NAME --json FILE` writes ([plugins/checking.md](plugins/checking.md)). A running server
tells its own row as `support` in `GET /v1/capabilities`."""


_ELSEWHERE = """**No device ran these: {names}.** Their rows say what a stand-in for the device or an interpreter of its
code ran. Triton's kernels are besides compiled for every chip, and not executed there
([backends/triton-kernels.md](backends/triton-kernels.md))."""


def page(cards: Sequence[Scorecard]) -> str:
    """docs/support-matrix.md."""
    rows = [of_scorecard(card) for card in cards]
    parts = [_INTRO, "## Backends", _backends(rows)]
    if elsewhere := [f"`{r.backend}`" for r in rows if r.execution != "device"]:
        parts.append(_ELSEWHERE.format(names=", ".join(elsewhere)))
    parts += ["## Operations", _operations(cards)]
    parts += ["## Through the engine", _engine(cards)]
    words = "\n".join(f"- `{word}`: {text}" for word, text in EXECUTIONS.items())
    parts += ["## What the words mean", words]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _backends(rows: Sequence[SupportRow]) -> str:
    head = ("backend", "device", "dtypes", "KV cache", "quantised", "blocks", "head sizes", "shapes",
            "executed", "checks")  # fmt: skip
    return _table(
        head,
        [
            (
                f"`{r.backend}`", f"`{r.device}`", ", ".join(r.dtypes), ", ".join(r.kv_dtypes),
                ", ".join(r.quantization) or "none", r.block_sizes, r.head_sizes, r.shapes,
                r.execution + (f" ({r.executed_on})" if r.executed_on else ""),
                f"{r.passed} passed, {r.failed} failed",
            )
            for r in rows
        ],
    )  # fmt: skip


def _states(card: Scorecard, group: str) -> dict[str, str]:
    found: dict[str, dict[str, list[str]]] = {}
    for row in card.rows:
        if row.group == group:
            word = (
                row.state if row.execution == card.execution else f"{row.state} ({row.execution})"
            )
            found.setdefault(row.op, {}).setdefault(word, []).append(row.dtype)
    return {
        op: next(iter(words)) if len(words) == 1
        else "; ".join(f"{word}: {', '.join(filter(None, names))}" for word, names in words.items())
        for op, words in found.items()
    }  # fmt: skip


def _by_op(cards: Sequence[Scorecard], group: str) -> str:
    columns = [_states(card, group) for card in cards]
    ops = list(dict.fromkeys(op for column in columns for op in column))
    head = ["", *(f"`{card.device}`" for card in cards)]
    return _table(head, [[f"`{op}`", *(c.get(op, "") for c in columns)] for op in ops])


def _operations(cards: Sequence[Scorecard]) -> str:
    return _by_op(cards, "op")


def _engine(cards: Sequence[Scorecard]) -> str:
    return _by_op(cards, "engine")
