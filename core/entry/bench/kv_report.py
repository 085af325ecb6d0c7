"""The KV waste of several strategies: a table, a record and a figure of stacked bars."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from octavo.core.entry.bench import plots
from octavo.core.entry.bench.kv_waste import STATES, Lengths, Pool, Replay
from octavo.core.entry.bench.stats import columns

_FORMAT = 1  # counts changes of the JSON's meaning

NOTE = """\
Shares of the pool's slots, averaged over the steps in which a request waited for memory.
used: holds a token; reserved: held for tokens still to come; internal: held for tokens that never
come; external: rounding, and holes that together would hold the next request but lie apart;
free: fewer than the next request needs (and, paged, than its neighbours need to grow by a block).
waste = reserved + internal + external. The five states add up to the pool in every step."""

_LABELS = {
    "used": "token states",
    "reserved": "reserved for future tokens",
    "internal": "internal fragmentation",
    "external": "external fragmentation",
    "free": "free, too few for the next request",
}


def table(name: str, trace: Sequence[Lengths], pool: Pool, replays: Sequence[Replay]) -> str:
    """One trace's strategies in rows; percentages are of the pool's slots."""
    rows: list[tuple[str, ...]] = [
        ("strategy", *STATES, "waste", "running", "steps", "preemptions")
    ]
    rows += [
        (
            replay.name,
            *(f"{replay.shares[state]:.1%}" for state in STATES),
            f"{replay.waste:.1%}",
            f"{replay.running:.1f}",
            str(replay.steps),
            str(replay.preemptions),
        )
        for replay in replays
    ]
    return (
        f"{name}: {len(trace)} requests, {_mean(trace, 'prompt'):.0f} prompt and "
        f"{_mean(trace, 'output'):.0f} output tokens on average; pool of {pool.slots:,} slots\n"
        + columns(rows)
    )


def _mean(trace: Sequence[Lengths], what: str) -> float:
    return fmean(getattr(lengths, what) for lengths in trace)


Results = Mapping[str, tuple[Sequence[Lengths], Sequence[Replay]]]
"""Trace name -> its requests, and their replays."""


def record(results: Results, pool: Pool, allocator: str, seed: int | None) -> dict[str, Any]:
    """Everything about a run as plain values for JSON. Shares are in [0, 1]."""
    return {
        "format": _FORMAT,
        "pool": dataclasses.asdict(pool),
        "allocator": allocator,
        "seed": seed,
        "traces": {
            name: {
                "requests": len(trace),
                "mean_prompt": _mean(trace, "prompt"),
                "mean_output": _mean(trace, "output"),
                "strategies": [dataclasses.asdict(r) | {"waste": r.waste} for r in replays],
            }
            for name, (trace, replays) in results.items()
        },
    }


def plot(folder: Path, results: Results) -> list[Path]:
    """A panel for each trace, a bar for each strategy; returns the files."""
    written: list[Path] = []
    title = "KV cache slots while requests wait"
    with plots.figure(folder, "kv_waste", title, panels=len(results), written=written) as panels:
        for axes, (name, (_, replays)) in zip(panels, results.items(), strict=True):
            names = [replay.name for replay in replays]
            bottom = [0.0] * len(replays)
            for state in STATES:
                heights = [100 * replay.shares[state] for replay in replays]
                axes.bar(names, heights, bottom=bottom, color=plots.COLORS[state],
                         label=_LABELS[state])  # fmt: skip
                if state == "used":
                    for x, height in enumerate(heights):
                        inside = height > 8
                        axes.text(
                            x,
                            height / 2 if inside else height + 2,
                            f"{height:.1f} %",
                            ha="center",
                            va="center" if inside else "bottom",
                            color="white" if inside else "black",
                        )
                bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
            axes.set(title=f"{name}-like trace", ylabel="share of the pool (%)", ylim=(0, 100))
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, loc="outside lower center", ncols=3,
                                fontsize="small")  # fmt: skip
    return written
