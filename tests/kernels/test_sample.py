"""The sampler against an independent numpy twin with the same random bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kernels import cpu
from octavo.kernels.cpu import checked

MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, counter: int, vocab: int) -> np.ndarray:
    key = splitmix64(seed ^ splitmix64(counter))
    lo, hi = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)

    def fmix(h: np.ndarray) -> np.ndarray:
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))

    h = fmix((np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B1) + lo) ^ hi)
    h = fmix(h + hi)
    return ((h >> np.uint32(9)).astype(np.float64) + 0.5) * 2.0**-23


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float):
    """Which tokens pass the filters, by sorting, in float64. Of ties with the last, top-k keeps all, and top-p
    those with the lowest ids."""
    x = logits.astype(np.float64)
    keep = x > -np.inf
    if 0 < top_k < len(x):
        keep &= x >= np.sort(x)[-top_k]
    weight = np.where(keep, np.exp((x - x.max()) / temperature), 0)
    if top_p < 1:
        order = np.argsort(-x, kind="stable")
        mass = np.cumsum(weight[order])
        last = int(np.argmax(mass >= float(np.float32(top_p)) * weight.sum() * (1 - 1e-15)))
        keep[order[last + 1 :]] = False
    if min_p > 0:
        keep &= weight >= float(np.float32(min_p))
    return keep


def twin(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    counter: int = 0,
) -> int:
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return -1
    if temperature == 0:
        return int(np.argmax(logits))
    keep = kept(logits, temperature, top_k, top_p, min_p)
    noise = -np.log(-np.log(uniform(seed, counter, len(logits))))
    x = (logits.astype(np.float64) - logits.max()) / np.float64(np.float32(temperature))
    return int(np.argmax(np.where(keep, x + noise, -np.inf)))


def draw(logits: torch.Tensor, **settings: list[float] | list[int]) -> list[int]:
    dtypes = {
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "min_p": torch.float32,
    }
    arrays = {
        name: torch.tensor(values, dtype=dtypes[name])
        if name in dtypes
        else np.array(values, dtype=np.uint64)
        for name, values in settings.items()
    }
    out = torch.full((len(logits),), -7)
    checked.sample(out, logits, **arrays)
    return out.tolist()


def random_settings(rng: np.random.Generator, rows: int, vocab: int) -> dict[str, list]:
    pick = rng.choice
    return {
        "temperature": [float(t) for t in pick([0, 0.3, 0.7, 1, 1.5, 5], rows)],
        "top_k": [int(k) for k in pick([0, 1, 2, 5, 40, vocab // 2, vocab, 10 * vocab], rows)],
        "top_p": [float(p) for p in pick([1, 0, 1e-6, 0.1, 0.5, 0.9, 0.999], rows)],
        "min_p": [float(p) for p in pick([0, 0, 1e-4, 0.05, 0.5, 1], rows)],
        "seed": [int(s) for s in rng.integers(0, 2**64, rows, dtype=np.uint64)],
        "counter": [int(s) for s in rng.integers(0, 2**40, rows)],
    }


@pytest.mark.parametrize("vocab", [1, 2, 15, 17, 100, 1000, 5003, 49152])
def test_same_tokens_as_the_twin(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 60 if vocab < 49152 else 16
    for scale in (0.01, 1, 4):
        logits = torch.from_numpy(rng.normal(size=(rows, vocab + 3)) * scale).float()[:, :vocab]
        settings = random_settings(rng, rows, vocab)
        got = draw(logits, **settings)
        for i in range(rows):
            row = {name: values[i] for name, values in settings.items()}
            assert got[i] == twin(logits[i].numpy(), **row), row


def test_ties_masks_and_odd_values(isa: str) -> None:
    rng = np.random.default_rng(1)
    rows, vocab = 200, 333
    logits = np.round(rng.normal(size=(rows, vocab)) * 2).astype(np.float32)  # many ties
    logits[rng.random((rows, vocab)) < 0.2] = -np.inf
    logits[rng.random((rows, vocab)) < 0.1] = -1e9
    logits[5] = 1.0
    logits[6] = -np.inf
    logits[7, 100] = np.nan
    logits[8] = -np.inf
    logits[8, 17] = -3e38
    logits[9, 40] = logits[9, 50] = np.inf
    logits[10] = np.finfo(np.float32).min
    logits[11, ::2] = np.finfo(np.float32).max
    settings = random_settings(rng, rows, vocab)
    got = draw(torch.from_numpy(logits), **settings)
    for i in range(rows):
        row = {name: values[i] for name, values in settings.items()}
        assert got[i] == twin(logits[i], **row), (i, row)
    assert got[6] == got[7] == -1
    assert got[8] == 17


def test_of_ties_top_p_keeps_as_many_as_it_needs(isa: str) -> None:
    """Those with the lowest ids, as the portable body does."""
    rows, vocab = 400, 100
    logits = torch.full((vocab,), -5.0)
    logits[torch.arange(3, 93, 10)] = 1.0  # nine, of 0.084 each
    logits[50] = 2.0
    even = logits.expand(rows, vocab).contiguous()
    seeds = list(range(rows))
    weight = torch.softmax(logits.double(), 0)
    for tied in (0, 1, 4, 8):
        share = float(weight[50] + tied * weight[3])
        for p, count in ((share - 1e-4, tied), (share + 1e-4, tied + 1)):
            got = draw(even, top_p=[p] * rows, seed=seeds)
            assert set(got) == {50, *range(3, 3 + 10 * count, 10)}, p
    # A smaller floor of min-p leaves the choice to top-p; a larger one leaves no tie at all.
    halves = {"top_p": [float(weight[50] + 4 * weight[3]) - 1e-4] * rows, "seed": seeds}
    assert len(set(draw(even, **halves, min_p=[0.01] * rows))) == 5
    assert set(draw(even, **halves, min_p=[0.9] * rows)) == {50}
    # Top-k keeps all nine, top-p then some of them; all tokens alike, half of them stay.
    assert set(draw(even, top_k=[4] * rows, seed=seeds)) == {50, *range(3, 93, 10)}
    together = draw(even, top_k=[4] * rows, top_p=[0.5] * rows, seed=seeds)
    assert set(together) == {50, 3, 13, 23, 33}
    flat = draw(torch.zeros(rows, vocab), top_p=[0.05] * rows, seed=seeds)
    assert set(flat) == {0, 1, 2, 3, 4, 5}  # 0.05 as float32 is a little more than 5 of 100


def test_ties_are_chosen_as_the_portable_body_chooses(isa: str) -> None:
    from octavo.core import ops
    from octavo.core.contract import SampleInputs

    rng = np.random.default_rng(9)
    rows, vocab = 120, 257
    logits = torch.from_numpy(np.round(rng.normal(size=(rows, vocab)) * 2) / 2).float()
    settings = random_settings(rng, rows, vocab)
    settings["seed"] = [s >> 1 for s in settings["seed"]]
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    columns = [torch.tensor(v, dtype=k) for v, k in zip(settings.values(), kinds, strict=True)]
    assert draw(logits, **settings) == ops.sample(logits, SampleInputs(*columns)).tolist()


def test_greedy_takes_the_lowest_id(isa: str) -> None:
    logits = torch.zeros(5, 10000)
    logits[0, [5000, 9000]] = 1
    logits[1, 9999] = 1
    logits[3] = float("-inf")
    logits[4, 9998] = float("nan")
    assert draw(logits, temperature=[0.0] * 5) == [5000, 9999, 0, -1, -1]


def test_one_token_left(isa: str) -> None:
    logits = torch.randn(30, 700)
    best = logits.argmax(-1).tolist()
    seeds = list(range(30))
    assert draw(logits, top_k=[1] * 30, seed=seeds) == best
    assert draw(logits, top_p=[1e-9] * 30, seed=seeds) == best
    assert draw(logits, top_p=[0.0] * 30, seed=seeds) == best
    assert draw(logits, min_p=[1.0] * 30, seed=seeds) == best
    assert draw(logits, temperature=[1e-30] * 30, seed=seeds) == best


def test_distribution(isa: str) -> None:
    """Chi-square of many draws; the draws of a seeded request differ by their counter alone."""
    n, vocab = 40000, 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    for seeds, counters in [([5] * n, range(n)), (range(n), [0] * n)]:
        got = draw(logits.expand(n, vocab).contiguous(), seed=list(seeds), counter=list(counters))
        want = logits.double().softmax(-1).numpy() * n
        counts = np.bincount(got, minlength=vocab)
        assert ((counts - want) ** 2 / want).sum() < 31.3  # 11 degrees of freedom, p = 0.001
    restricted = draw(logits.expand(n, vocab).contiguous(), top_k=[4] * n, seed=list(range(n)))
    top = logits.topk(4).indices
    want = torch.zeros(vocab).double()
    want[top] = logits[top].double().softmax(-1) * n
    counts = np.bincount(restricted, minlength=vocab)
    assert counts[want.numpy() == 0].sum() == 0
    ok = want.numpy() > 0
    assert ((counts - want.numpy()) ** 2 / want.clamp(min=1).numpy())[ok].sum() < 16.3


def test_batch_mates_do_not_matter(isa: str) -> None:
    logits = torch.randn(9, 5000)
    seeds, counters = list(range(100, 109)), list(range(9))
    together = draw(logits, top_p=[0.8] * 9, seed=seeds, counter=counters)
    for i in range(9):
        alone = draw(logits[i : i + 1], top_p=[0.8], seed=[seeds[i]], counter=[counters[i]])
        assert alone == together[i : i + 1]


def test_logprobs(isa: str) -> None:
    for vocab in (1, 5, 100, 4099):
        logits = torch.randn(7, vocab) * 5
        ids = torch.randint(0, vocab, (7,))
        logits[0, ids[0]] = logits[0].max()
        logprob, lse, rank = torch.empty(7), torch.empty(7), torch.empty(7, dtype=torch.int64)
        cpu.token_logprobs(logprob, rank, lse, logits, ids)
        mine = logits.gather(1, ids[:, None])
        torch.testing.assert_close(lse, logits.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-6)
        want = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0].float()
        torch.testing.assert_close(logprob, want, rtol=1e-6, atol=1e-6)
        assert torch.equal(rank, (logits > mine).sum(-1) + 1)
