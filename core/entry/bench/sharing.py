"""How many KV blocks parallel samples and beams save by sharing, as the PagedAttention paper counts it.

Saved is (logical - physical) / logical: of the blocks that the sequences of each request would hold if they
shared none, those that sharing leaves out; over all requests of a step that have several sequences, averaged
over steps (Kwon et al. 2023, figure 15). What different requests share does not count.

Samples share their prompt, whatever they draw, so they are replayed through the engine's scheduler without a
model. Beams share what their common ancestors wrote, which depends on what is likely: they need a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from octavo.core.admission import SchedulerLimits
from octavo.core.blocks import BlockManager
from octavo.core.engine import Engine
from octavo.core.entry.bench import plots
from octavo.core.entry.bench.kv_waste import Lengths
from octavo.core.entry.bench.stats import columns, markdown
from octavo.core.entry.bench.workload import Encode, fixed_lengths
from octavo.core.params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.sharing import held
from octavo.core.types import Request, StepPlan, StepResult

PAPER = {
    ("samples", "alpaca"): (0.061, 0.098),
    ("samples", "sharegpt"): (0.162, 0.305),
    ("beams", "alpaca"): (0.376, 0.552),
    ("beams", "sharegpt"): (0.443, 0.663),
}
"""(kind, trace) -> the paper's least and most, for OPT-13B and widths of 2 to 6."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What one kind and width saved on a trace. `saved`: share of blocks, a mean over `steps`. `prompt`,
    `output`: mean tokens of the requests as they were run."""

    kind: str
    trace: str
    width: int
    requests: int
    prompt: float
    output: float
    steps: int
    saved: float


class Counter:
    """Adds up steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.shares: list[float] = []

    def step(self) -> None:
        """Counts the blocks held now; a step in which no request has several sequences is left out."""
        physical = logical = 0
        for group in self._scheduler.roster.families.values():
            if len(group.live) > 1:
                own_physical, own_logical = held(group.live.values())
                physical, logical = physical + own_physical, logical + own_logical
        if logical:
            self.shares.append((logical - physical) / logical)

    @property
    def saved(self) -> float:
        """The mean share."""
        return fmean(self.shares) if self.shares else 0.0


def capped(trace: Iterable[Lengths], most: int) -> list[Lengths]:
    """The same requests, none with more than `most` output tokens."""
    return [Lengths(lengths.prompt, min(most, lengths.output)) for lengths in trace]


def _saving(kind: str, name: str, width: int, trace: Sequence[Lengths], counter: Counter) -> Saving:
    return Saving(
        kind,
        name,
        width,
        len(trace),
        fmean(lengths.prompt for lengths in trace),
        fmean(lengths.output for lengths in trace),
        len(counter.shares),
        counter.saved,
    )


def replay_samples(
    name: str, trace: Sequence[Lengths], width: int, slots: int, block_size: int
) -> Saving:
    """Requests of `width` samples through the scheduler, in a pool of `slots` tokens, with a runner that
    computes nothing.

    Raises:
        RequestRefused: a request could never run in this pool.
    """
    longest = max(lengths.prompt + lengths.output for lengths in trace)
    blocks = BlockManager(slots // block_size, block_size, prefix_caching=True)
    limits = SchedulerLimits(
        max_num_seqs=1024,
        max_num_batched_tokens=2048,
        max_model_len=longest,
        max_logits_rows=1025,
        fcfs_only=True,
    )
    scheduler = Scheduler(blocks, limits)
    for i, lengths in enumerate(trace):
        params = SamplingParams(n=width, max_tokens=lengths.output, ignore_eos=True)
        scheduler.add(Request(id=str(i), prompt_token_ids=[i] * lengths.prompt, params=params))
    # Every sample another text: preempted and back, it finds its prompt in the cache and no more than that.
    draw = np.random.default_rng(0)
    counter = Counter(scheduler)
    while (plan := scheduler.schedule()) is not None:
        counter.step()
        drawn = sum(item.samples for item in plan.items)
        scheduler.commit(plan, StepResult(draw.integers(0, 1 << 31, drawn), (), {}))
    return _saving("samples", name, width, trace, counter)


def run_beams(
    engine: Engine, encode: Encode, name: str, trace: Sequence[Lengths], width: int
) -> Saving:
    """Requests of `width` beams through an engine that nobody else uses, all submitted at once, on English
    text, to their full length whatever EOS says.

    Raises:
        ParamError: a request that the engine cannot take.
        RuntimeError: a request that ended otherwise.
    """
    items = fixed_lengths(encode, [(lengths.prompt, lengths.output) for lengths in trace])
    for i, item in enumerate(items):
        params = SamplingParams(
            n=width, use_beam_search=True, max_tokens=item.output_len, ignore_eos=True
        )
        engine.add(
            Request(
                id=f"{name}-{width}-{i}",
                prompt_token_ids=item.prompt_token_ids,
                params=params,
                eos_token_ids=(),
            )
        )
    scheduler: Any = engine.scheduler
    counter, commit = Counter(scheduler), scheduler.commit

    def watched(plan: StepPlan, result: StepResult) -> Any:
        counter.step()  # before children take over what their parents hold
        return commit(plan, result)

    scheduler.commit = watched
    try:
        while engine.has_unfinished():
            for update in engine.step():
                if update.finish_reason not in (None, "length"):
                    raise RuntimeError(f"a search ended by itself: {update.stop_reason}")
    finally:
        del scheduler.commit
        engine.abort([sequence.request.id for sequence in list(scheduler.sequences())])
    return _saving("beams", name, width, trace, counter)


def measure(
    traces: dict[str, list[Lengths]],
    widths: Sequence[int],
    one: Callable[[str, list[Lengths], int], Saving],
    progress: Callable[[str], None],
) -> list[Saving]:
    """`one` for each trace and width."""
    found = []
    for name, trace in traces.items():
        for width in widths:
            progress(f"{name}, {width} wide")
            found.append(one(name, trace, width))
    return found


def table(found: Sequence[Saving], *, as_markdown: bool = False) -> str:
    """A row for each kind, trace and width, beside the paper's range."""
    rows = [("kind", "trace", "width", "requests", "prompt", "output", "steps", "saved", "paper, 2 to 6")]  # fmt: skip
    for each in found:
        low, high = PAPER[each.kind, each.trace]
        rows.append(
            (
                each.kind,
                each.trace,
                str(each.width),
                str(each.requests),
                f"{each.prompt:.0f}",
                f"{each.output:.0f}",
                str(each.steps),
                f"{100 * each.saved:.1f} %",
                f"{100 * low:.1f}–{100 * high:.1f} %",
            )
        )
    return (markdown if as_markdown else columns)(rows)


def record(found: Sequence[Saving]) -> dict[str, Any]:
    """Everything as plain values for JSON. Shares are in [0, 1]."""
    return {
        "savings": [asdict(each) | {"paper": PAPER[each.kind, each.trace]} for each in found],
    }


def plot(folder: Path, found: Sequence[Saving], title: str) -> list[Path]:
    """A panel for each kind, a line for each trace, the paper's ranges behind."""
    written: list[Path] = []
    kinds = list(dict.fromkeys(each.kind for each in found))
    names = list(dict.fromkeys(each.trace for each in found))
    colors = dict(zip(names, plots.colors(2 * len(names))[::2], strict=True))
    with plots.figure(folder, "sharing", title, panels=len(kinds), written=written) as panels:
        for axes, kind in zip(panels, kinds, strict=True):
            for name in names:
                own = [each for each in found if (each.kind, each.trace) == (kind, name)]
                axes.plot([each.width for each in own], [100 * each.saved for each in own], "o-",
                          color=colors[name], label=name)  # fmt: skip
                low, high = PAPER[kind, name]
                axes.axhspan(100 * low, 100 * high, color=colors[name], alpha=0.12)
            axes.set(title=kind, xlabel="width", ylabel="blocks saved (%); band: the paper")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    return written
