"""One request at a time through `LLM.stream`: what a single caller waits for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.core.entry.bench import plots
from octavo.core.entry.bench.load import Sample
from octavo.core.entry.bench.stats import COLUMNS, columns, milliseconds, summary
from octavo.core.entry.bench.workload import Encode, Item, fixed_lengths
from octavo.core.entry.llm import LLM
from octavo.core.params import SamplingParams

LATENCIES = ("ttft", "tpot", "itl", "e2e")

FORMULAS = """\
TTFT  first output of the stream - call            (s -> ms, over repeats)
E2E   last output - call                           (s -> ms, over repeats)
TPOT  (E2E - TTFT) / (output tokens - 1)           (s -> ms, over repeats)
ITL   output - the one before it                   (s -> ms, over all gaps of all repeats)
Prompts are token ids, so tokenising is not part of it; making text of the output is."""

Shape = tuple[int, int]
"""(prompt, output) tokens."""


def measure(
    llm: LLM,
    encode: Encode,
    input_lens: Sequence[int],
    output_lens: Sequence[int],
    repeats: int,
    warm_up: int,
) -> dict[Shape, list[Sample]]:
    """Runs every combination of lengths, one request after the other, greedy, whatever EOS says.

    Args:
        encode: text -> token ids without special tokens.
        warm_up: requests of each combination that are run before and not counted.

    Raises:
        ParamError: a request that the engine cannot take.
        RuntimeError: a request that did not bring its tokens.
    """
    shapes = list(itertools.product(input_lens, output_lens))
    items = iter(
        fixed_lengths(encode, [shape for shape in shapes for _ in range(warm_up + repeats)])
    )
    found = {}
    for shape in shapes:
        samples = [_one(llm, next(items)) for _ in range(warm_up + repeats)]
        found[shape] = samples[warm_up:]
    return found


def _one(llm: LLM, item: Item) -> Sample:
    params = SamplingParams(temperature=0.0, max_tokens=item.output_len, ignore_eos=True)
    called = time.perf_counter()
    sample = Sample(due=called, ready=called, sent=called)
    sample.prompt_tokens = len(item.prompt_token_ids)
    for output in llm.stream({"prompt_token_ids": item.prompt_token_ids}, params):
        sample.last = time.perf_counter()
        [completion] = output.outputs
        if completion.token_ids:
            sample.chunks.append(sample.last)
            sample.output_tokens += len(completion.token_ids)
        if completion.finish_reason == "error":
            raise RuntimeError(f"generation failed: {completion.stop_reason}")
    if sample.output_tokens != item.output_len:
        raise RuntimeError(f"{sample.output_tokens} of {item.output_len} tokens came: no measure")
    return sample


def values(results: Mapping[Shape, Sequence[Sample]]) -> list[dict[str, Any]]:
    """Each combination's latencies in seconds, summarised and as they were, for JSON."""
    return [
        {
            "input_len": prompt,
            "output_len": output,
            "ttft": summary([sample.ttft for sample in samples]),
            "tpot": summary([t for sample in samples if (t := sample.tpot) is not None]),
            "itl": summary([gap for sample in samples for gap in sample.gaps]),
            "e2e": summary([sample.e2e for sample in samples]),
            "repeats": [
                {"ttft": sample.ttft, "tpot": sample.tpot, "e2e": sample.e2e} for sample in samples
            ],
        }
        for (prompt, output), samples in results.items()
    ]


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Percentiles of each combination, and the formulas."""
    rows: list[tuple[str, ...]] = [("input", "output", "ms", *COLUMNS)]
    for case in found:
        for key in LATENCIES:
            cells = (milliseconds(case[key].get(column)) for column in COLUMNS)
            rows.append((str(case["input_len"]), str(case["output_len"]), key.upper(), *cells))
    return f"{columns(rows)}\n\n{FORMULAS}"


def plot(folder: Path, results: Mapping[Shape, Sequence[Sample]], title: str) -> list[Path]:
    """Shares of requests (TTFT, E2E) and of gaps (ITL) that took at most so long."""
    written: list[Path] = []
    with plots.figure(folder, "latency", title, panels=3, written=written) as panels:
        for axes, key in zip(panels, ("ttft", "itl", "e2e"), strict=True):
            for (prompt, output), samples in results.items():
                times = (
                    [gap for sample in samples for gap in sample.gaps]
                    if key == "itl"
                    else [getattr(sample, key) for sample in samples]
                )
                axes.ecdf([1e3 * t for t in times or [0.0]], label=f"{prompt} in, {output} out")
            axes.set(xlabel=f"{key.upper()} (ms)", ylabel="share at most so long")
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    return written
