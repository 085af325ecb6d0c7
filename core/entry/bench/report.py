"""A measurement as a table for people and as JSON for machines."""

from __future__ import annotations

import dataclasses
from statistics import quantiles
from typing import Any

import msgspec

from octavo.core.config import EngineConfig
from octavo.core.engine import ModelInfo
from octavo.core.entry.bench.compare import Comparison
from octavo.core.entry.bench.machine import Load, describe, usable_cores
from octavo.core.entry.bench.profile import (
    HOST_TARGET,
    PARTS,
    SAMPLE_TARGET,
    Profile,
    kernel_shares,
    shares,
)
from octavo.core.entry.bench.throughput import Throughput
from octavo.core.entry.bench.workload import Workload

_FORMAT = 1  # counts changes of the JSON's meaning


def _percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return dict.fromkeys(("p50", "p99"), values[0] if values else 0.0)
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


def latencies(result: Throughput) -> dict[str, dict[str, float]]:
    """Seconds to the first token, and between a request's later tokens, over the requests."""
    gaps = [
        (t.last_token - t.first_token) / (len(tokens) - 1)
        for t, tokens in zip(result.timings, result.tokens, strict=True)
        if len(tokens) > 1
    ]
    return {
        "time_to_first_token": _percentiles([t.time_to_first_token for t in result.timings]),
        "time_per_output_token": _percentiles(gaps),
    }


def record(
    workload: Workload,
    config: EngineConfig,
    info: ModelInfo,
    result: Throughput,
    comparison: Comparison | None,
    profile: Profile | None,
    warning: str | None,
) -> dict[str, Any]:
    """Everything about a run as plain values for JSON."""
    found: dict[str, Any] = {
        "format": _FORMAT,
        "workload": {
            "name": workload.name,
            "seed": workload.seed,
            "requests": len(workload.items),
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
        },
        "octavo": _plain(result, "timings", "tokens") | {"latencies_seconds": latencies(result)},
        "machine": describe(),
        "config": dataclasses.asdict(config),
        "engine": msgspec.to_builtins(info),
        "disturbed": warning,
    }
    if comparison is not None:
        found["transformers"] = _plain(comparison, "tokens")
        found["ratio_output"] = result.output_per_second / comparison.output_per_second
    if profile is not None and profile.steps:
        full = profile.full_steps()
        found["profile"] = {
            "shares": shares(profile.steps),
            "kernels": kernel_shares(profile.steps),
            "full_steps": {
                "steps": len(full),
                "sequences": full[0].sequences,
                "seconds_per_step": sum(s.total for s in full) / len(full),
                "shares": shares(full),
                "kernels": kernel_shares(full),
            },
        }
    return found


def _plain(result: Throughput | Comparison, *left_out: str) -> dict[str, Any]:
    values = {k: v for k, v in vars(result).items() if k not in left_out}
    if isinstance(result.load, Load):
        values["load"] = dataclasses.asdict(result.load)
    if isinstance(result, Comparison):
        values["differences"] = [dataclasses.asdict(d) for d in result.differences]
    values["output_tokens_per_second"] = result.output_per_second
    values["total_tokens_per_second"] = result.total_per_second
    return values


def table(
    workload: Workload, info: ModelInfo, result: Throughput, comparison: Comparison | None
) -> str:
    """The run's figures in columns, and beneath them what is needed to judge them."""
    rows: list[tuple[str, ...]] = [
        ("", "requests", "output tok/s", "total tok/s", "wall s", "ratio")
    ]
    ratio = "" if comparison is None else _ratio(result, comparison)
    rows.append(_row(f"octavo ({info.device}, {info.numbers})", result, ratio))
    if comparison is not None:
        rows.append(_row("transformers (one by one)", comparison, "1.00"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(
        0,
        f"{info.name}, workload {workload.name}: {len(workload.items)} requests, "
        f"{workload.prompt_tokens:,} prompt + {workload.output_tokens:,} output tokens",
    )
    lines += ["", *_notes(result, comparison)]
    return "\n".join(lines)


def _row(name: str, result: Throughput | Comparison, ratio: str) -> tuple[str, ...]:
    return (
        name,
        str(result.requests),
        f"{result.output_per_second:.1f}",
        f"{result.total_per_second:.1f}",
        f"{result.seconds:.2f}",
        ratio,
    )


def _ratio(result: Throughput, comparison: Comparison) -> str:
    return f"{result.output_per_second / comparison.output_per_second:.2f}"


def _notes(result: Throughput, comparison: Comparison | None) -> list[str]:
    times = latencies(result)
    first, later = times["time_to_first_token"], times["time_per_output_token"]
    peak = f", peak memory {result.peak_rss_bytes / 1e6:,.0f} MB" if result.peak_rss_bytes else ""
    lines = [
        f"first token p50 {first['p50']:.2f} s, p99 {first['p99']:.2f} s; between tokens "
        f"p50 {later['p50'] * 1e3:.0f} ms, p99 {later['p99'] * 1e3:.0f} ms",
        f"{result.steps} steps, {result.preemptions} preemptions, {result.cached_tokens:,} prompt "
        f"tokens from the prefix cache{peak}",
        f"scheduling {result.host_seconds:.2f} s, running {result.runner_seconds:.2f} s, "
        f"text and loop {result.output_side_seconds:.2f} s",
    ]
    if comparison is not None:
        lines.append(f"tokens equal to transformers': {comparison.equal} of {comparison.requests}")
        lines += [
            f"  request {d.request}: differs from output token {d.step} on ({d.octavo} here, "
            f"{d.transformers} there; margin {d.margin:.2g} logits)"
            for d in comparison.differences
        ]
    return lines


def neighbour_record(count: int, alone: Throughput, beside: Throughput) -> dict[str, Any]:
    """The same workload alone and beside `count` spinning processes, as plain values."""
    return {
        "processes": count,
        "octavo": _plain(beside, "timings", "tokens"),
        "ratio_output": beside.output_per_second / alone.output_per_second,
    }


def neighbour_line(count: int, alone: Throughput, beside: Throughput) -> str:
    """What `count` spinning processes leave of the throughput."""
    ratio = beside.output_per_second / alone.output_per_second
    return (
        f"beside {count} spinning processes on {usable_cores()} cores: "
        f"{beside.output_per_second:.1f} output tok/s, {ratio:.0%} of what it is alone"
    )


def profile_table(profile: Profile) -> str:
    """Each part's share of the time: over all steps, and over the decode steps at full width."""
    full = profile.full_steps()
    whole, parts = shares(profile.steps), shares(full)
    per_step = sum(s.total for s in full) / len(full)
    head = f"all {len(profile.steps)} steps", f"{len(full)} steps of {full[0].sequences} sequences"
    lines = [f"{'share of the time':<18}  {head[0]:>16}  {head[1]:>28}"]

    def line(name: str, all_steps: float, full_steps: float) -> str:
        spent = full_steps * per_step * 1e3
        return f"{name:<18}  {all_steps:>16.1%}  {full_steps:>20.1%} {spent:>5.1f} ms"

    lines += [line(part, whole[part], parts[part]) for part in (*PARTS, "host")]
    if kernels := kernel_shares(profile.steps):
        lines.append("of forward and sample:")
        wide = kernel_shares(full)
        lines += [line(name, share, wide.get(name, 0.0)) for name, share in kernels.items()]
    lines.append(
        f"host: all but prepare and forward; {_verdict(parts['host'], HOST_TARGET)}. "
        f"sample: {_verdict(parts['sample'], SAMPLE_TARGET)}"
    )
    return "\n".join(lines)


def _verdict(share: float, target: float) -> str:
    return f"{share:.1%}, {'within' if share < target else 'ABOVE'} the target of {target:.0%}"
