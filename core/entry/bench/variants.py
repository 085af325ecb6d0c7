"""One workload under several configurations, turn by turn: what an option brings, or costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.core.entry.bench.stats import columns, markdown
from octavo.core.entry.bench.throughput import Bench
from octavo.core.entry.bench.workload import Workload


@dataclass(frozen=True)
class Variant:
    """output, total: tokens a second, median of the rounds. ratios: of `total` to the first variant's, round by
    round. cached: share of the prompt tokens that came from the prefix cache. drafted, accepted: tokens. same:
    answers that are token for token the first variant's, of `requests`; all rounds."""

    name: str
    output: float
    total: float
    ratios: list[float]
    cached: float
    preemptions: int
    drafted: int
    accepted: int
    same: int
    requests: int

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios: a slow round of the machine slows all variants of it."""
        return statistics.median(self.ratios)


def measure(
    benches: Mapping[str, Bench],
    workload: Workload,
    repeats: int,
    progress: Callable[[str], None],
) -> list[Variant]:
    """`repeats` rounds of the workload; each round with other prompts of the same lengths, so that no round finds
    its beginnings in the prefix cache. Who goes first changes from round to round."""
    for bench in benches.values():
        bench.check(workload)
        bench.run(workload.warm_up)
    names = list(benches)
    runs: dict[str, list[Any]] = {name: [] for name in names}
    before = {name: bench.engine.stats() for name, bench in benches.items()}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            progress(f"{name}, round {repeat + 1} of {repeats}")
            runs[name].append(benches[name].run(workload.items))
        workload = workload.again()
    first = runs[names[0]]
    found = []
    for name, own in runs.items():
        after = benches[name].engine.stats()
        pairs = [
            (mine, theirs)
            for run, other in zip(own, first, strict=True)
            for mine, theirs in zip(run.tokens, other.tokens, strict=True)
        ]
        found.append(
            Variant(
                name,
                statistics.median(run.output_per_second for run in own),
                statistics.median(run.total_per_second for run in own),
                [a.total_per_second / b.total_per_second for a, b in zip(own, first, strict=True)],
                sum(run.cached_tokens for run in own) / sum(run.prompt_tokens for run in own),
                sum(run.preemptions for run in own),
                after.drafted_tokens - before[name].drafted_tokens,
                after.accepted_tokens - before[name].accepted_tokens,
                sum(mine == theirs for mine, theirs in pairs),
                len(pairs),
            )
        )
    return found


def record(found: Sequence[Variant], workload: Workload) -> dict[str, Any]:
    """What was measured, for JSON."""
    return {
        "workload": {"name": workload.name, "requests": len(workload.items)},
        "variants": [asdict(v) | {"ratio": v.ratio} for v in found],
    }


def table(found: Sequence[Variant], as_markdown: bool = False) -> str:
    """A row for each variant."""
    head = ("variant", "output tok/s", "total tok/s", "times the first", "cached", "preempted", "accepted drafts", "same answers")  # fmt: skip
    rows = [head]
    for v in found:
        drafts = f"{v.accepted} of {v.drafted}" if v.drafted else "–"
        spread = f"{v.ratio:.3f} ({min(v.ratios):.3f} to {max(v.ratios):.3f})"
        rows.append(
            (v.name, f"{v.output:.1f}", f"{v.total:.1f}", spread if v is not found[0] else "1",
             f"{v.cached:.0%}", str(v.preemptions), drafts, f"{v.same} of {v.requests}")
        )  # fmt: skip
    return (markdown if as_markdown else columns)(rows)
