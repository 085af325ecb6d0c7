#!/usr/bin/env python3
"""What paged attention reaches of a GPU: decode of its memory bandwidth, prefill of its bf16 peak.

    ci/bench/gpu_attention.py [--device cuda] [--json FILE] [--goals]

Bandwidth and peak are measured on the same device first: the faster of a large copy and a large sum, and a
square matrix product. Every case is checked against torch's own attention before it is timed. With --goals
the exit status is 1 if decode stays below 80 % or prefill below 60 % in the best case of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.backends.triton.inputs import TritonInputs
from octavo.backends.triton.ops import TritonKV, TritonOps
from octavo.plugins import Batch, KVSpec

Q_HEADS, KV_HEADS, SIZE = 32, 8, 128
DECODE_GOAL, PREFILL_GOAL = 0.8, 0.6


@dataclass(frozen=True)
class Case:
    """Sequences with so many query tokens at the end of so much context."""

    name: str
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    block: int = 16
    kv_dtype: str = "bfloat16"


CASES = (
    Case("decode 64 x 4096", (1,) * 64, (4096,) * 64),
    Case("decode 64 x 4096, blocks of 64", (1,) * 64, (4096,) * 64, 64),
    Case("decode 256 x 1024", (1,) * 256, (1024,) * 256),
    Case("decode 8 x 32768", (1,) * 8, (32768,) * 8),
    Case("decode 1 x 131072", (1,), (131072,)),
    Case("decode 64 of 100 to 8000", (1,) * 64, tuple(range(100, 8000, 124))[:64]),
    Case("decode 64 x 4096, fp8", (1,) * 64, (4096,) * 64, kv_dtype="fp8"),
    Case("prefill 1 x 16384", (16384,), (16384,)),
    Case("prefill 4 x 4096", (4096,) * 4, (4096,) * 4),
    Case("prefill 4 x 4096, blocks of 64", (4096,) * 4, (4096,) * 4, 64),
    Case("prefill 16 x 1024", (1024,) * 16, (1024,) * 16),
    Case("prefill 2048 after 14336", (2048,), (16384,)),
    Case("mixed: 2048 and 64 x 2048", (2048, *(1,) * 64), (2048,) * 65),
)


def seconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of one run on the device, captured as a graph so that launching costs nothing."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes per second that the device's memory gives: a copy (read and write) or a sum, the faster."""
    source = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    return max(copied, source.nbytes / seconds(lambda: torch.sum(source)))


def peak() -> float:
    """bf16 operations per second of a large matrix product on random numbers."""
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b)


def batch_of(case: Case) -> tuple[Batch, int]:
    """The step, over blocks in random order, and how many blocks its cache has."""
    need = [-(-context // case.block) for context in case.contexts]
    order = np.random.default_rng(0).permutation(np.arange(1, sum(need) + 1)).astype(np.int32)
    table = np.zeros((len(need), max(need)), np.int32)
    ends = np.cumsum(need)
    for row, (count, end) in enumerate(zip(need, ends, strict=True)):
        table[row, :count] = order[end - count : end]
    tokens = sum(case.queries)
    batch = Batch(
        num_tokens=tokens,
        num_seqs=len(need),
        token_ids=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int64),
        query_start=np.concatenate([[0], np.cumsum(case.queries)]).astype(np.int32),
        context_lens=np.array(case.contexts, np.int32),
        logits_rows=np.zeros(1, np.int32),
        slots=(np.full(tokens, -1, np.int64),),
        block_tables=(table,),
        max_query_len=max(case.queries),
        max_context_len=max(case.contexts),
    )
    return batch, sum(need) + 1


def filled(ops: TritonOps, case: Case, blocks: int) -> TritonKV:
    """A cache full of random numbers."""
    spec = KVSpec((0,), KV_HEADS, SIZE, SIZE, case.kv_dtype)
    handle = ops.alloc_kv([spec], blocks, case.block)[0]
    for cache in (handle.cache.k, handle.cache.v):
        if case.kv_dtype == "fp8":
            cache.random_(0, 0x60)  # positive numbers up to 32, no NaN
        else:
            cache.normal_()
    return handle


def error(case: Case, batch: Batch, handle: TritonKV, q: torch.Tensor, out: torch.Tensor) -> float:
    """The largest difference from torch's attention in float32, over the first, middle and last
    sequences' last queries."""
    if case.kv_dtype == "fp8":
        return float("nan")  # what its codes mean is checked with the kernels
    worst = 0.0
    for s in sorted({0, len(case.queries) // 2, len(case.queries) - 1}):
        table = torch.from_numpy(batch.block_tables[0][s].astype(np.int64)).cuda()
        k, v = (
            cache[table].flatten(0, 1)[: case.contexts[s]].float().transpose(0, 1)
            for cache in (handle.cache.k, handle.cache.v)
        )
        row = int(batch.query_start[s + 1]) - 1
        group = Q_HEADS // KV_HEADS
        mine = q[row].float().view(KV_HEADS, group, SIZE)
        weights = (mine @ k.transpose(1, 2) * SIZE**-0.5).softmax(-1)
        wanted = (weights @ v).view(Q_HEADS, SIZE)
        worst = max(worst, float((out[row].float() - wanted).abs().max()))
    return worst


def measure(case: Case, device: str, read: float, compute: float) -> dict[str, Any]:
    """Time, share of the device's limit and error of one case."""
    ops = TritonOps(device)
    batch, blocks = batch_of(case)
    handle = filled(ops, case, blocks)
    q = torch.randn(batch.num_tokens, Q_HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    meta = TritonInputs(batch, None, device)

    def run() -> torch.Tensor:
        return ops.paged_attention(q, handle, meta, scale=SIZE**-0.5)

    off = error(case, batch, handle, q, run())
    time = seconds(run)
    width = handle.cache.k.element_size()
    moved = sum(case.contexts) * KV_HEADS * 2 * SIZE * width + 2 * q.nbytes
    pairs = sum(n * c - n * (n - 1) // 2 for n, c in zip(case.queries, case.contexts, strict=True))
    work = 4 * SIZE * Q_HEADS * pairs
    return {
        **asdict(case),
        "queries": len(case.queries),
        "contexts": max(case.contexts),
        "microseconds": round(time * 1e6, 1),
        "bytes_per_second": moved / time,
        "share_of_bandwidth": round(moved / time / read, 3),
        "operations_per_second": work / time,
        "share_of_peak": round(work / time / compute, 3),
        "largest_error": off,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--goals", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing was measured", file=sys.stderr)
        return 2
    read, compute = bandwidth(), peak()
    print(
        f"{torch.cuda.get_device_name()}: {read / 1e12:.2f} TB/s, {compute / 1e12:.0f} TFLOP/s bf16"
    )
    rows = []
    for case in CASES:
        torch.cuda.empty_cache()
        row = measure(case, options.device, read, compute)
        rows.append(row)
        print(
            f"{case.name:<34} {row['microseconds']:>10} us  {row['share_of_bandwidth']:>6.1%} of bandwidth  "
            f"{row['share_of_peak']:>6.1%} of peak  error {row['largest_error']:.1e}",
            flush=True,
        )
    if options.json:
        found = {"device": torch.cuda.get_device_name(), "bandwidth": read, "peak": compute}
        options.json.write_text(json.dumps({**found, "cases": rows}, indent=1))
    wrong = [row["name"] for row in rows if row["largest_error"] > 0.05]
    decode = max(r["share_of_bandwidth"] for r in rows if r["name"].startswith("decode"))
    prefill = max(r["share_of_peak"] for r in rows if r["name"].startswith("prefill"))
    print(f"best decode {decode:.1%} of bandwidth (goal {DECODE_GOAL:.0%}), "
          f"best prefill {prefill:.1%} of peak (goal {PREFILL_GOAL:.0%})")  # fmt: skip
    if wrong:
        print(f"wrong results: {', '.join(wrong)}", file=sys.stderr)
        return 1
    return int(options.goals and (decode < DECODE_GOAL or prefill < PREFILL_GOAL))


if __name__ == "__main__":
    sys.exit(main())
