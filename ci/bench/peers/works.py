"""The works that every engine gets: the same token ids, greedy, with fixed output lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.core.entry.bench.workload import Encode, fixed_lengths, make_workload
from octavo.core.entry.bench.workload import Item as WorkloadItem
from peers.job import Item, Job

Metric = Literal["output", "total", "prompt", "start", "batched"]

_EQUAL = {"prefill160": (8, 160, 1), "prefill512": (8, 512, 1), "batched": (1, 160, 64)}
"""work -> number of requests, prompt and output tokens of each."""
_START_PROMPT = "The first letters of the alphabet are"


@dataclass(frozen=True)
class Work:
    """One column of the table.

    metric: what of it is compared: output, prompt or all tokens per second, or seconds to the first
    token.
    unit: printed in the head of the column.
    lower_is_better: of the metric.
    """

    name: str
    metric: Metric
    unit: str
    about: str
    lower_is_better: bool = False


WORKS = {
    work.name: work
    for work in (
        Work(
            "sharegpt", "output", "output tok/s", "64 requests of log-normal lengths, all at once"
        ),
        Work("single", "output", "output tok/s", "one request, 128 tokens in and 128 out"),
        Work("prefill160", "prompt", "prompt tok/s", "8 prompts of 160 tokens, one by one, 1 out"),
        Work("prefill512", "prompt", "prompt tok/s", "8 prompts of 512 tokens, one by one, 1 out"),
        Work("uniform", "output", "output tok/s", "32 requests of 160 in and 64 out, all at once"),
        Work("prefix", "total", "total tok/s", "32 x (1,024 shared + 32 own in, 32 out), cold"),
        Work("startup", "start", "s", "process start to first token", lower_is_better=True),
        Work("batched", "batched", "tok/s", "llama-batched-bench: 160 in, 64 out, 1, 8, 32 wide"),
    )
}


def make_job(name: str, encode: Encode, *, requests: int | None, threads: int) -> Job:
    """A work for any engine; the engine's options are still to be added.

    Args:
        encode: text -> token ids of the model's tokenizer, without special tokens.
        requests: at most so many requests, for a trial; None: all.
    """
    if name == "startup":
        return Job(name, "startup", [Item(encode(_START_PROMPT), 1)], threads=threads)
    warm_up = _items(make_workload("single", encode).warm_up)
    if name not in _EQUAL:
        count = None if name == "single" else requests
        workload = make_workload(name, encode, num_requests=count)
        return Job(name, "throughput", _items(workload.items), warm_up, threads=threads)
    count, prompt, output = _EQUAL[name]
    count = count if requests is None else min(count, requests)
    # Cut after the warm-up's text, so that no cache knows a prompt's beginning.
    lengths = [(len(item.prompt), item.output) for item in warm_up] + [(prompt, output)] * count
    items = _items(fixed_lengths(encode, lengths))[len(warm_up) :]
    if name == "batched":
        return Job(name, "batched", items, threads=threads)
    return Job(name, "throughput", items, warm_up, sequential=True, threads=threads)


def _items(items: Sequence[WorkloadItem]) -> list[Item]:
    return [Item(list(item.prompt_token_ids), item.output_len) for item in items]
