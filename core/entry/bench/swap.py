"""What host memory for KV blocks brings: a load that the KV cache is too small for, by each way of preempting,
and prompts that come back after their blocks had to go.

The last way of each has no host memory and as many KV blocks more: where the device computes in the host's
memory, that is what the same bytes could be instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.core.config import EngineConfig
from octavo.core.engine import Engine
from octavo.core.entry.bench.stats import columns, markdown
from octavo.core.entry.bench.throughput import Bench
from octavo.core.entry.bench.workload import Item

_MEASURED = ("preemptions", "swaps", "swapped_out_blocks", "swapped_in_blocks", "prefix_hit_tokens")


@dataclass(frozen=True, slots=True)
class Way:
    """One configuration of the comparison."""

    name: str
    kv_blocks: int
    swap_space: float  # GiB
    mode: str

    def options(self) -> dict[str, Any]:
        """`EngineConfig`'s."""
        return {
            "num_kv_blocks": self.kv_blocks,
            "kv_memory": None,
            "kv_fraction": None,
            "swap_space": self.swap_space,
            "preemption_mode": self.mode,
        }


@dataclass(frozen=True, slots=True)
class Found:
    """What one way took for one load: the fastest of its turns."""

    load: str
    way: str
    kv_blocks: int
    host_blocks: int
    seconds: float
    output_tokens: int
    recomputed_tokens: int
    preemptions: int
    swaps: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    prefix_hit_tokens: int


def ways(kv_blocks: int, block_bytes: int, host_blocks: int) -> list[Way]:
    """The configurations, for a cache of `kv_blocks` beside `host_blocks` in host memory."""
    space = (host_blocks + 0.5) * block_bytes / (1 << 30)
    return [
        Way("recompute", kv_blocks, 0.0, "auto"),
        Way("swap", kv_blocks, space, "swap"),
        Way("auto", kv_blocks, space, "auto"),
        Way("more KV blocks", kv_blocks + host_blocks, 0.0, "auto"),
    ]


def run_together(bench: Bench, items: Sequence[Item]) -> tuple[float, int, int]:
    """(seconds, output tokens, recomputed tokens) of a load that comes at once."""
    result = bench.run(items)
    recomputed = sum(timings.num_recomputed_tokens for timings in result.timings)
    return result.seconds, result.output_tokens, recomputed


def run_by_turns(bench: Bench, items: Sequence[Item]) -> tuple[float, int, int]:
    """The same of one request after the other, each of which came once before."""
    for item in items:
        bench.run([item])
    begun = time.perf_counter()
    tokens = sum(bench.run([item]).output_tokens for item in items)
    return time.perf_counter() - begun, tokens, 0


def measure(
    build: Callable[[Way], tuple[Engine, Bench]],
    each: Sequence[Way],
    load: str,
    run: Callable[[Bench, Sequence[Item]], tuple[float, int, int]],
    items: Sequence[Item],
    repeats: int,
    progress: Callable[[str], None],
) -> list[Found]:
    """One load by each way, turn by turn, an engine for each turn: host memory would know the one before.
    The first item warms it up and is not part of the load."""
    best: dict[str, Found] = {}
    for turn in range(repeats):
        for way in each:
            progress(f"{load}: {way.name}, {turn + 1} of {repeats}")
            engine, bench = build(way)
            try:
                bench.run(items[:1])
                found = _one(engine, bench, way, load, run, items[1:])
            finally:
                engine.shutdown()
            if way.name not in best or found.seconds < best[way.name].seconds:
                best[way.name] = found
    return list(best.values())


def _one(
    engine: Engine,
    bench: Bench,
    way: Way,
    load: str,
    run: Callable[[Bench, Sequence[Item]], tuple[float, int, int]],
    items: Sequence[Item],
) -> Found:
    before = engine.stats()
    seconds, tokens, recomputed = run(bench, items)
    after = engine.stats()
    counts = {name: getattr(after, name) - getattr(before, name) for name in _MEASURED}
    host = engine.info.host_blocks
    return Found(load, way.name, way.kv_blocks, host, seconds, tokens, recomputed, **counts)


def table(found: Sequence[Found], as_markdown: bool = False) -> str:
    """The measurement for people; gains are over recomputing."""
    head = ("load", "way", "KV blocks", "on the host", "output tok/s", "gain", "preempted", "swapped",
            "recomputed tokens", "blocks out", "blocks in", "cached tokens")  # fmt: skip
    rows = [head]
    base = {each.load: each.seconds for each in reversed(found)}
    for f in found:
        rows.append(
            (
                f.load,
                f.way,
                str(f.kv_blocks),
                str(f.host_blocks),
                f"{f.output_tokens / f.seconds:.0f}",
                f"{base[f.load] / f.seconds:.2f}x",
                str(f.preemptions),
                str(f.swaps),
                f"{f.recomputed_tokens:,}",
                str(f.swapped_out_blocks),
                str(f.swapped_in_blocks),
                f"{f.prefix_hit_tokens:,}",
            )
        )
    return markdown(rows) if as_markdown else columns(rows)


def record(found: Sequence[Found]) -> dict[str, Any]:
    """The measurement for machines."""
    return {"kind": "swap", "measured": [asdict(each) for each in found]}


def configured(config: EngineConfig, way: Way) -> EngineConfig:
    """The engine's configuration for one way."""
    return config.with_values(**way.options())
