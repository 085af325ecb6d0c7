"""Sampling in Triton's interpreter: the same tokens as the portable body, from the same random bits."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from octavo.core import ops as portable
from octavo.core.contract import SampleInputs
from octavo.kernels.triton import logprobs, sampling
from octavo.kernels.triton.numbers import draw_key, key_value, order_key, uniform

INF = float("inf")


@triton.jit
def uniform_kernel(seed, counter, out, N: tl.constexpr):
    low, high = draw_key(tl.load(seed), tl.load(counter))
    at = tl.arange(0, N)
    tl.store(out + at, uniform(at, low, high))


def signed(value: int) -> int:
    """The int64 that has the bits of an unsigned 64-bit number."""
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("counter", [0, 1, 2**33 + 5])
def test_the_bits_are_the_cores(seed: int, counter: int) -> None:
    out = torch.empty(4096)
    uniform_kernel[(1,)](torch.tensor([signed(seed)]), torch.tensor([counter]), out, N=4096)
    assert torch.equal(out, portable.uniform_bits(seed, counter, 4096, torch.device("cpu")))


@triton.jit
def key_kernel(x, keys, back, N: tl.constexpr):
    at = tl.arange(0, N)
    key = order_key(tl.load(x + at))
    tl.store(keys + at, key)
    tl.store(back + at, key_value(key))


def test_keys_keep_the_order() -> None:
    odd = torch.tensor([-INF, -3.4e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3.4e38, INF])
    x = torch.cat([odd, torch.randn(246) * 10]).sort().values
    keys, back = torch.empty(256, dtype=torch.int32), torch.empty(256)
    key_kernel[(1,)](x, keys, back, N=256)
    wide = keys.long()
    assert torch.equal(wide[1:] > wide[:-1], x[1:] > x[:-1])
    assert torch.equal(back, x)


def rows(count: int, **settings: list[float]) -> tuple[torch.Tensor, ...]:
    kinds = {
        "temperature": (1.0, torch.float32),
        "top_k": (0, torch.int32),
        "top_p": (1.0, torch.float32),
        "min_p": (0.0, torch.float32),
        "seed": (0, torch.int64),
        "counter": (0, torch.int64),
    }
    return tuple(
        torch.tensor(settings.get(name, [default] * count), dtype=dtype)
        for name, (default, dtype) in kinds.items()
    )


def both(logits: torch.Tensor, **settings: list[float]) -> tuple[list[int], list[int]]:
    """Tokens of the kernels and of the portable body."""
    made = rows(len(logits), **settings)
    want = portable.sample(logits, SampleInputs(*made))
    return sampling.sample(logits, *made).tolist(), want.tolist()


def any_settings(rng: random.Random, count: int, vocab: int) -> dict[str, list[float]]:
    def some(*values: float) -> list[float]:
        return [rng.choice(values) for _ in range(count)]

    return {
        "temperature": some(0, 0.3, 0.7, 1, 1.5, 5),
        "top_k": some(0, 0, 1, 2, 5, 40, vocab // 2, vocab, 10 * vocab),
        "top_p": some(1, 0, 1e-6, 0.1, 0.5, 0.9, 0.999),
        "min_p": some(0, 0, 1e-4, 0.05, 0.5, 1),
        "seed": [signed(rng.getrandbits(64)) for _ in range(count)],
        "counter": [rng.getrandbits(40) for _ in range(count)],
    }


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("vocab", [1, 2, 17, 1000, 5003, 20000])
def test_same_tokens_as_the_portable_body(vocab: int, scale: float) -> None:
    """20000 candidates are more than fit registers, and their vocabulary has three parts."""
    torch.manual_seed(vocab)
    rng = random.Random(vocab + scale)
    logits = (torch.randn(5, vocab + 3) * scale)[:, :vocab]
    got, want = both(logits, **any_settings(rng, 5, vocab))
    assert got == want


@pytest.mark.parametrize("seed", range(4))
def test_ties_are_cut_where_the_portable_body_cuts_them(seed: int) -> None:
    """Logits of few values, as 16-bit ones are: of equal ones the lowest ids stay."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    logits = (torch.randn(10, 333) * 2).round()
    logits[torch.rand(10, 333) < 0.2] = -INF
    logits[torch.rand(10, 333) < 0.1] = -1e9
    logits[0] = 1.0
    got, want = both(logits, **any_settings(rng, 10, 333))
    assert got == want


def test_more_ties_than_room() -> None:
    logits = torch.zeros(2, 5000)
    logits[1, 4000:] = 1.0
    got, want = both(logits, top_p=[0.5, 0.9], top_k=[0, 4500], seed=[1, 2])
    assert got == want


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logits_of_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    logits = (torch.randn(4, 700) * 3).to(dtype)
    made = rows(4, **any_settings(random.Random(3), 4, 700))
    got = sampling.sample(logits, *made)
    assert torch.equal(got, sampling.sample(logits.float(), *made))


def test_greedy() -> None:
    logits = torch.zeros(6, 20000)
    logits[0, [5000, 9000]] = 1
    logits[1, 19999] = 1
    logits[3] = -INF
    logits[4, 9998] = float("nan")
    logits[5] = -INF
    logits[5, 17] = -3e38
    wanted = [5000, 19999, 0, -1, -1, 17]
    assert sampling.greedy(logits).tolist() == wanted
    assert sampling.sample(logits, *rows(6, temperature=[0.0] * 6)).tolist() == wanted
    drawn = sampling.sample(logits, *rows(6, top_p=[0.9] * 6, top_k=[3] * 6)).tolist()
    assert drawn[3:] == [-1, -1, 17]


def test_one_token_left() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 300)
    best, seeds = logits.argmax(-1).tolist(), list(range(5))
    for settings in (
        {"top_k": [1] * 5},
        {"top_p": [1e-9] * 5},
        {"top_p": [0.0] * 5},
        {"min_p": [1.0] * 5},
        {"temperature": [1e-30] * 5},
        {"temperature": [1e-42] * 5, "top_p": [0.5] * 5},
    ):
        assert sampling.sample(logits, *rows(5, seed=seeds, **settings)).tolist() == best, settings


def test_infinite_logits() -> None:
    logits = torch.randn(2, 60)
    logits[:, [40, 50]] = INF
    assert sampling.sample(logits, *rows(2, top_p=[1.0, 0.5])).tolist() == [40, 40]


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 9000)
    made = rows(3, top_p=[0.8] * 3, seed=[5, 6, 7], counter=[1, 2, 3])
    together = sampling.sample(logits, *made)
    for i in range(3):
        alone = sampling.sample(logits[i : i + 1], *(setting[i : i + 1] for setting in made))
        assert alone[0] == together[i]


def test_distribution() -> None:
    """Chi-square of draws that differ by their counter alone."""
    count, vocab = 200, 6
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    made = rows(count, counter=list(range(count)), seed=[5] * count)
    tokens = sampling.sample(logits.expand(count, vocab), *made)
    want = logits.double().softmax(-1) * count
    counts = torch.bincount(tokens, minlength=vocab)
    assert ((counts - want) ** 2 / want).sum() < 20.5  # 5 degrees of freedom, p = 0.001


def test_logprobs() -> None:
    torch.manual_seed(2)
    for vocab in (1, 5, 100, 9000):
        logits = torch.randn(4, vocab + 2)[:, :vocab] * 5
        ids = torch.randint(0, vocab, (4,))
        ids[0] = logits[0].argmax()
        logprob, rank, norm = logprobs.token_logprobs(logits, ids)
        torch.testing.assert_close(
            norm.double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-6
        )
        want = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(logprob.double(), want, rtol=1e-6, atol=2e-6)
        assert torch.equal(rank, (logits > logits.gather(1, ids[:, None])).sum(-1) + 1)
        assert rank[0] == 1


def test_logprobs_of_odd_rows() -> None:
    logits = torch.randn(4, 9000)
    logits[0, 8192:] = -INF  # a part of its own without any
    logits[1] = -INF
    logits[2, 7] = INF
    logits[3, 9] = float("nan")
    ids = torch.tensor([3, 3, 3, 3])
    logprob, _, norm = logprobs.token_logprobs(logits, ids)
    want, _, wanted_norm = portable.token_logprobs(logits, ids)
    torch.testing.assert_close(norm, wanted_norm, equal_nan=True)
    torch.testing.assert_close(logprob, want, equal_nan=True)
