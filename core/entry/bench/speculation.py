"""What drafts bring: the same requests with and without, turn by turn in one engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import truediv
from pathlib import Path
from typing import Any

from octavo.core.entry.bench import plots
from octavo.core.entry.bench.stats import columns, markdown
from octavo.core.entry.llm import LLM
from octavo.core.params import SamplingParams

_PASSAGE = (
    "The harbour master keeps three books. In the first he writes the name of every ship, in the second "
    "what it carries, and in the third who has paid. On Monday the Aurora brought salt and rope, on Tuesday "
    "the Meridian brought oranges, and on Thursday nothing came, because of the fog."
)
_CODE = '''def area(width, height):
    """The area of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return width * height


def volume(width, height, depth):
    """The volume of a box."""
    if depth < 0:
        raise ValueError("the depth must not be negative")
    return area(width, height) * depth
'''
TASKS = {
    "quote": f'Text:\n"{_PASSAGE}"\n\nThe same text, word for word:\n"',
    "code edit": f"# Before:\n{_CODE}\n# After, with the names `a` and `b`:\ndef area(a, b):\n",
    "summary": f"{_PASSAGE}\n\nSummary: The harbour master keeps",
    "free text": "Once upon a time, in a small village at the foot of a mountain,",
}


@dataclass(frozen=True)
class Point:
    """One task at one load. Each round runs it without drafts, with them, and without again. speedup: median of
    the rounds' ratios of seconds, mean of both without to the one with. apart: how much both without differ, at
    most. plain, drafting: output tokens a second, medians. drafted, accepted: tokens, of all rounds, in `drafts`
    drafts. same: whether all answers were the same with and without."""

    task: str
    streams: int
    plain: float
    drafting: float
    speedup: float
    apart: float
    drafts: int
    drafted: int
    accepted: int
    same: bool

    @property
    def length(self) -> float:
        """Mean number of tokens that a step with a draft brought."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


def measure(
    llm: LLM,
    streams: Sequence[int],
    output_len: int,
    repeats: int,
    progress: Callable[[str], None],
) -> list[Point]:
    """Every task at every load; greedy, whatever EOS says. Requests of one load differ in their first
    words, and are in the prefix cache after the first round, which is not counted."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    found = []
    for task, prompt in TASKS.items():
        for count in streams:
            progress(f"{task}, {count} at once")
            prompts = [f"{i + 1}. {prompt}" for i in range(count)]
            rounds = []
            for repeat in range(1 + repeats):
                if repeat == 1:
                    before = llm._engine.stats()
                rounds.append([_run(llm, prompts, params, on) for on in (False, True, False)])
            after = llm._engine.stats()
            times = [[seconds for seconds, _ in each] for each in rounds[1:]]
            plain = [(first + again) / 2 for first, _, again in times]
            drafting = [seconds for _, seconds, _ in times]
            answers = [answer for each in rounds for _, answer in each]
            found.append(
                Point(
                    task,
                    count,
                    count * output_len / statistics.median(plain),
                    count * output_len / statistics.median(drafting),
                    statistics.median(map(truediv, plain, drafting)),
                    max(max(a, b) / min(a, b) for a, _, b in times) - 1,
                    after.drafts - before.drafts,
                    after.drafted_tokens - before.drafted_tokens,
                    after.accepted_tokens - before.accepted_tokens,
                    all(answer == answers[0] for answer in answers),
                )
            )
    return found


def _run(
    llm: LLM, prompts: list[str], params: SamplingParams, drafts: bool
) -> tuple[float, list[list[int]]]:
    """Seconds, and the answers."""
    llm._engine.scheduler.speculation.enabled = drafts
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    return seconds, [list(output.outputs[0].token_ids) for output in outputs]


def crossover(points: Sequence[Point], task: str) -> int | None:
    """The fewest streams from which on drafts no longer bring 3 % more; None: they always do."""
    own = sorted((p for p in points if p.task == task), key=lambda p: p.streams)
    behind = [p.streams for p in own if p.speedup >= 1.03]
    above = [p.streams for p in own if not behind or p.streams > behind[-1]]
    return above[0] if above else None


def record(points: Sequence[Point]) -> dict[str, Any]:
    """What was measured, for JSON."""
    return {
        "points": [asdict(p) | {"length": p.length} for p in points],
        "crossover": {task: crossover(points, task) for task in TASKS},
    }


def table(points: Sequence[Point], as_markdown: bool = False) -> str:
    """A row for each task and load."""
    rows = [("task", "streams", "plain tok/s", "drafts tok/s", "times", "plain apart", "tokens a draft", "accepted", "same")]  # fmt: skip
    for p in points:
        share = f"{100 * p.accepted / p.drafted:.0f} %" if p.drafted else "–"
        cells = (
            f"{p.plain:.1f}",
            f"{p.drafting:.1f}",
            f"{p.speedup:.2f}",
            f"{100 * p.apart:.0f} %",
            f"{p.length:.2f}",
            share,
        )
        rows.append((p.task, str(p.streams), *cells, "yes" if p.same else "no"))
    text = (markdown if as_markdown else columns)(rows)
    notes = []
    for task in TASKS:
        at = crossover(points, task)
        notes.append(
            f"{task}: " + ("faster at every load" if at is None else f"no gain from {at} on")
        )
    return f"{text}\n\n" + "; ".join(notes)


def plot(folder: Path, points: Sequence[Point], title: str) -> list[Path]:
    """Speed-up and acceptance length over the load."""
    written: list[Path] = []
    with plots.figure(folder, "speculation", title, panels=2, written=written) as (left, right):
        for task in TASKS:
            own = [p for p in points if p.task == task]
            left.plot([p.streams for p in own], [p.speedup for p in own], marker="o", label=task)
            right.plot([p.streams for p in own], [p.length for p in own], marker="o", label=task)
        left.axhline(1, color="#999999", linewidth=1)
        left.set(ylabel="times the tokens a second without drafts")
        right.set(ylabel="tokens a step with a draft brings")
        for axes in (left, right):
            axes.set(xlabel="requests at once")
            axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    return written
