"""How a decode step grows with the number of sequences, and with their length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from octavo.core.config import EngineConfig
from octavo.core.engine import ModelInfo
from octavo.core.entry.bench import plots
from octavo.core.entry.bench.stats import columns, markdown, milliseconds
from octavo.core.entry.bench.steps import Step, Steps, median_step, sized
from octavo.core.entry.wiring import build_engine, resolve_device
from octavo.core.loading.files import ModelFiles

NOTE = """\
A step is the median of those run; tok/s = sequences / step. Linear in the context: time = base + slope x
context by least squares; "off" is how far a step is from that line."""


@dataclass(frozen=True, slots=True)
class Point:
    """One width and length: the median step's seconds, those spent in attention where the backend tells,
    and the context that its sequences had."""

    sequences: int
    context: float
    seconds: float
    attention: float | None

    @property
    def per_second(self) -> float:
        return self.sequences / self.seconds


@dataclass(frozen=True)
class Scaling:
    """Points by number of sequences and by context; contexts beyond what the engine takes."""

    info: ModelInfo
    by_sequences: list[Point]
    by_context: list[Point]
    too_long: list[int]


def measure(
    config: EngineConfig,
    files: ModelFiles,
    *,
    batches: Sequence[int],
    batch_context: int,
    contexts: Sequence[int],
    repeats: int,
    progress: Callable[[str], None],
) -> Scaling:
    """Decode steps of each number of sequences at `batch_context` tokens, and of one at each of `contexts`.

    Raises:
        ConfigError, ModelError: what was asked cannot run here.
    """
    # Long contexts share their beginning: the prefix cache saves most of their prompts.
    config = sized(
        config.with_values(enable_prefix_caching=True),
        max(batches),
        max(batch_context + repeats + 64, -(-(max(contexts) + repeats + 64) // max(batches))),
    )
    engine = build_engine(config, files=files)
    try:
        resolved = resolve_device(config.device)
        steps = Steps(engine, resolved.backend.instruments(resolved.device))
        wide = []
        for batch in batches:
            progress(f"{batch} sequences of {batch_context} tokens")
            wide.append(_point(steps.decode(batch, batch_context, repeats)))
        limit = engine.info.max_model_len
        # One that just fills the engine's longest sequence is cut by the few tokens that it draws.
        longest = limit - steps.beyond(repeats)
        fitting = dict.fromkeys(min(context, longest) for context in contexts if context <= limit)
        deep = []
        for context in fitting:
            progress(f"one sequence of {context} tokens")
            deep.append(_point(steps.decode(1, context, repeats, same=True)))
        return Scaling(engine.info, wide, deep, [c for c in contexts if c > limit])
    finally:
        engine.shutdown()


def _point(steps: list[Step]) -> Point:
    step = median_step(steps)
    context = fmean(chunk.context for chunk in step.chunks)
    return Point(len(step.chunks), context, step.seconds, step.phases.get("attention"))


def line(points: Sequence[Point]) -> tuple[float, float] | None:
    """(seconds, seconds a token of context) of the least-squares line; None for fewer than two contexts."""
    middle, level = fmean(p.context for p in points), fmean(p.seconds for p in points)
    spread = sum((p.context - middle) ** 2 for p in points)
    if len(points) < 2 or not spread:
        return None
    slope = sum((p.context - middle) * (p.seconds - level) for p in points) / spread
    return level - slope * middle, slope


def table(found: Scaling, *, as_markdown: bool = False) -> str:
    """Tokens a second by sequences, and the step by context."""
    render = markdown if as_markdown else columns
    first = found.by_sequences[0]
    rows: list[tuple[str, ...]] = [("sequences", "context", "step ms", "tok/s", "times the first")]
    for p in found.by_sequences:
        gain = p.per_second / first.per_second
        rows.append(
            (
                str(p.sequences),
                f"{p.context:.0f}",
                milliseconds(p.seconds),
                f"{p.per_second:.1f}",
                f"{gain:.1f}",
            )
        )
    parts = [f"{found.info.name} ({found.info.device}, {found.info.numbers})", render(rows)]
    if found.by_context:
        fit = line(found.by_context)
        rows = [("context, one sequence", "step ms", "off", "attention ms")]
        for p in found.by_context:
            off = "-" if fit is None else f"{p.seconds / (fit[0] + fit[1] * p.context) - 1:+.0%}"
            rows.append(
                (f"{p.context:.0f}", milliseconds(p.seconds), off, milliseconds(p.attention))
            )
        parts.append(render(rows))
        if fit is not None:
            parts.append(
                f"base {fit[0] * 1e3:.2f} ms, slope {fit[1] * 1e6:.2f} ms for 1,000 tokens"
            )
    if found.too_long:
        parts.append(
            f"contexts {', '.join(map(str, found.too_long))} left out: the engine takes sequences of "
            f"{found.info.max_model_len} tokens"
        )
    return "\n\n".join([*parts, NOTE])


def record(found: Scaling) -> dict[str, Any]:
    """Everything as plain values for JSON."""

    def values(points: Sequence[Point]) -> list[dict[str, float | None]]:
        return [
            {
                "sequences": p.sequences,
                "context": p.context,
                "seconds": p.seconds,
                "attention_seconds": p.attention,
                "tokens_per_second": p.per_second,
            }
            for p in points
        ]

    fit = line(found.by_context) if found.by_context else None
    return {
        "by_sequences": values(found.by_sequences),
        "by_context": values(found.by_context),
        "line": None if fit is None else {"base_seconds": fit[0], "seconds_per_token": fit[1]},
        "too_long": found.too_long,
        "note": NOTE,
    }


def plot(folder: Path, found: Scaling) -> list[Path]:
    """Tokens a second by sequences, and the step's time by context."""
    written: list[Path] = []
    title = f"{found.info.name} ({found.info.device}, {found.info.numbers})"
    with plots.figure(folder, "scaling", title, panels=2, written=written) as (left, right):
        wide, deep = found.by_sequences, found.by_context
        left.plot([p.sequences for p in wide], [p.per_second for p in wide], "o-")
        left.set(xlabel="sequences", ylabel="output tokens a second", xscale="log", yscale="log")
        right.plot([p.context for p in deep], [1e3 * p.seconds for p in deep], "o")
        if (fit := line(deep) if deep else None) is not None:
            ends = [0.0, max(p.context for p in deep)]
            right.plot(ends, [1e3 * (fit[0] + fit[1] * x) for x in ends], "--", linewidth=1)
        right.set(xlabel="context (tokens)", ylabel="step (ms)")
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.grid(alpha=0.3)
    return written
