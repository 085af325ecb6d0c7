"""The sampler over plain rows of logits: filters against float64 sets, draws against their odds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import NullRunner, Rig, request, rig

from octavo.core import ops
from octavo.core.admission import mixed_seed
from octavo.core.bad_words import VocabularyIndex
from octavo.core.blocks import root_hash
from octavo.core.contract import Ops, SampleInputs
from octavo.core.sampler import Sampler, token_logprobs
from octavo.core.sequence import Sequence
from octavo.core.types import ScheduledTokens, StepPlan, StepResult

V = 50


def no_vocabulary(skip_special: bool) -> VocabularyIndex:
    raise AssertionError("the vocabulary is only for bad words")


def sampler(vocabulary: Any = no_vocabulary) -> Sampler:
    return Sampler(ops.sample, Ops(), "cpu", vocabulary)


def sequence(
    prompt: list[int] | int = 3,
    output: list[int] | None = None,
    eos: tuple[int, ...] = (),
    **params: Any,
) -> Sequence:
    params.setdefault("seed", 0)
    q = request("s", prompt, eos=eos, **params)
    made = Sequence(q, 0, root_hash(None, None, ()), q.params.seed or 0, 10_000)
    for token in output or ():
        made.append(token)
    made.pending_samples = 1 if output else q.params.n
    return made


def draw(logits: torch.Tensor, *sequences: Sequence, using: Sampler | None = None) -> StepResult:
    items = tuple(ScheduledTokens(s, s.num_tokens - 1, 1, s.pending_samples) for s in sequences)
    return (using or sampler()).run(StepPlan(1, items), logits.clone())


def distinct_logits(seed: int, rows: int = 1, vocab: int = V) -> torch.Tensor:
    """Rows of logits with no two values close enough for float32 to confuse their order."""
    dice = np.random.default_rng(seed)
    steps = dice.permuted(np.tile(np.arange(vocab), (rows, 1)), axis=1)
    return torch.tensor(
        steps * 0.137 - 3 + dice.uniform(0, 0.05, (rows, vocab)), dtype=torch.float32
    )


def kept(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """Which tokens may be drawn: the definition, in float64. Boundaries too close to call are kept out."""
    row = logits.double().numpy() / temperature
    order = np.argsort(-row)
    if top_k > 0:
        order = order[:top_k]
    p = np.exp(row[order] - row[order].max())
    p /= p.sum()
    before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
    order, p = (x[(before < top_p) | (np.arange(len(p)) == 0)] for x in (order, p))
    return set(order[p >= min_p * p[0] * (1 - 1e-9)].tolist())


# ---------------------------------------------------------------------------------- filters


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 7, V - 1, V, V + 5]),
    st.floats(0.013, 1.0),
    st.sampled_from([0.0, 0.0131, 0.1, 0.51, 1.0]),
)
def test_filters_keep_the_set_of_the_definition(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = distinct_logits(seed)[0]
    row = ops.filter_row(logits / temperature, top_k, top_p, min_p)
    got = set(torch.nonzero(row > float("-inf"))[:, 0].tolist())
    assert got == kept(logits, temperature, top_k, top_p, min_p)
    assert int(logits.argmax()) in got


@pytest.mark.parametrize(
    "params",
    [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.9, "temperature": 2.0}],
)
def test_only_kept_tokens_are_drawn_and_all_of_them(params: dict) -> None:
    logits = distinct_logits(5, vocab=12)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    rows = [sequence(seed=s, **full) for s in range(1500)]
    tokens = draw(logits.expand(1500, -1), *rows).tokens
    assert set(tokens.tolist()) == kept(logits[0], **full)


@pytest.mark.parametrize(
    "params", [{"top_p": 1e-60}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-4}]
)
def test_narrow_filters_are_greedy(params: dict) -> None:
    logits = distinct_logits(9)
    wanted = int(logits[0].argmax())
    assert [int(draw(logits, sequence(seed=s, **{"temperature": 1.0, **params})).tokens[0]) for s in range(20)] == [wanted] * 20  # fmt: skip


def test_ties_at_the_edge_of_top_k_all_stay() -> None:
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert ops.filter_row(row, 2, 1.0, 0.0).isfinite().tolist() == [False, True, True, True, False]


def test_masked_tokens_stay_masked() -> None:
    row = torch.full((6,), float("-inf"))
    row[[1, 4]] = torch.tensor([0.0, 1.0])
    for s in range(30):
        token = int(draw(row[None], sequence(seed=s, temperature=5.0, top_p=0.999)).tokens[0])
        assert token in (1, 4)


# ------------------------------------------------------------------------------ odds


def chi_square(counts: np.ndarray, odds: np.ndarray) -> float:
    wanted = odds * counts.sum()
    assert wanted.min() >= 5
    return float(((counts - wanted) ** 2 / wanted).sum())


def limit(freedom: int) -> float:
    """About the 1 - 1e-5 quantile of chi-square (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.27 * math.sqrt(2 / (9 * freedom))) ** 3


LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.0, 1.1, -0.4, 0.9, 1.6])


def by(seeds: np.ndarray, counters: np.ndarray, **params: float) -> np.ndarray:
    n = len(seeds)
    p = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    inputs = SampleInputs(
        *(torch.full((n,), p[k]) for k in ("temperature", "top_k", "top_p", "min_p")),
        seed=torch.from_numpy(seeds.astype(np.uint64).view(np.int64)),
        counter=torch.from_numpy(counters.astype(np.int64)),
    )
    return ops.sample(LOGITS.expand(n, -1), inputs).numpy()


N = 4000
WAYS = {
    "consecutive seeds": (np.arange(N), np.zeros(N)),
    "consecutive tokens": (np.full(N, 42), np.arange(N)),
    "samples of one request": (
        np.array([(7 + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(N)], np.uint64),
        np.zeros(N),
    ),
    "requests without a seed": (
        np.array([mixed_seed(0, i) for i in range(N)], np.uint64),
        np.zeros(N),
    ),
    "huge seeds": (np.uint64(2**64 - 1) - np.arange(N, dtype=np.uint64), np.ones(N)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_draws_follow_the_softmax(way: str, temperature: float) -> None:
    tokens = by(*WAYS[way], temperature=temperature)
    odds = torch.softmax(LOGITS.double() / temperature, 0).numpy()
    assert chi_square(np.bincount(tokens, minlength=8), odds) < limit(7)


def test_filtered_draws_follow_the_renormalised_softmax() -> None:
    tokens = by(np.arange(N), np.zeros(N), top_k=4)
    keep = sorted(kept(LOGITS, 1.0, 4, 1.0, 0.0))
    odds = torch.softmax(LOGITS.double()[keep], 0).numpy()
    assert chi_square(np.bincount(tokens, minlength=8)[keep], odds) < limit(3)


@pytest.mark.parametrize("other", ["next token", "next seed", "next sample"])
def test_neighbouring_draws_are_independent(other: str) -> None:
    seeds, counters = np.arange(N, dtype=np.uint64), np.zeros(N)
    golden = np.uint64(0x9E3779B97F4A7C15)
    second = {
        "next token": (seeds, counters + 1),
        "next seed": (seeds + np.uint64(1), counters),
        "next sample": (seeds + golden, counters),
    }[other]
    hot = {"temperature": 4.0}
    pairs = by(seeds, counters, **hot) * 8 + by(*second, **hot)
    odds = torch.softmax(LOGITS.double() / 4, 0).numpy()
    assert chi_square(np.bincount(pairs, minlength=64), np.outer(odds, odds).ravel()) < limit(63)


def test_seeds_are_64_bits() -> None:
    rows = [sequence(seed=s, temperature=50.0) for s in (0, 1 << 32, 1 << 63, -1, 2**64 - 1)]
    logits = torch.zeros(1, 50_000)
    tokens = draw(logits.expand(5, -1), *rows).tokens.tolist()
    assert len(set(tokens[:4])) == 4
    assert tokens[3] == tokens[4]  # -1 and 2^64 - 1 are the same bits


def test_each_token_of_a_sequence_has_bits_of_its_own() -> None:
    row = torch.zeros(1, 50_000)
    tokens = [
        int(draw(row, sequence([1], [2] * made, seed=3, temperature=1.0)).tokens[0])
        for made in range(12)
    ]
    assert len(set(tokens)) == 12


def test_no_two_pairs_of_seed_and_token_share_bits() -> None:
    grid = {
        tuple(ops.uniform_bits(seed, counter, 4, torch.device("cpu")).tolist())
        for seed in range(25)
        for counter in range(25)
    }
    assert len(grid) == 625


def test_rows_do_not_see_each_other() -> None:
    logits = distinct_logits(3, rows=7)
    rows = [
        sequence(seed=i, temperature=i / 3, top_k=i, top_p=1 - i / 10, min_p=i / 50)
        for i in range(7)
    ]
    together = draw(logits, *rows).tokens.tolist()
    assert together == [int(draw(logits[i : i + 1], row).tokens[0]) for i, row in enumerate(rows)]
    assert together[0] == int(logits[0].argmax())


def test_samples_of_a_request_differ_and_repeat() -> None:
    row = torch.zeros(1, 10_000)
    family = sequence(n=8, temperature=1.0, seed=5)
    first = draw(row.expand(8, -1), family).tokens.tolist()
    assert len(set(first)) == 8
    assert first == draw(row.expand(8, -1), sequence(n=8, temperature=1.0, seed=5)).tokens.tolist()
    alone = [
        int(draw(row, sequence(seed=family.sample_seed(k), temperature=1.0)).tokens[0])
        for k in range(8)
    ]
    assert first == alone


# ------------------------------------------------------------- a whole engine of random logits


class LogitsRunner(NullRunner):
    """The null runner with logits made from its hash, and the real sampler behind them."""

    vocab = 997

    def draw(self, step: StepPlan, rows: np.ndarray) -> StepResult:
        if not hasattr(self, "sampler"):
            self.sampler = sampler()
        logits = np.stack([np.random.default_rng(int(h)).normal(0, 2, self.vocab) for h in rows])
        return self.sampler.run(step, torch.from_numpy(logits).float())


SUBJECTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 4, "top_p": 0.9},
    "family": {"temperature": 1.0, "seed": 8, "n": 3},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "hot and penalised": {"temperature": 1.2, "seed": 1, "frequency_penalty": 1.5, "min_p": 0.02},
    "biased": {"logit_bias": {5: 6.0, 9: -100.0}, "min_tokens": 4, "stop_token_ids": [5]},
    "logprobs": {"logprobs": 3},
}


def outcome(r: Rig, name: str) -> list[Any]:
    n = SUBJECTS[name].get("n", 1)
    return [(r.tokens[name, i], r.logprobs[name, i]) for i in range(n)]


@pytest.fixture(scope="module")
def quiet() -> dict[str, list[Any]]:
    found = {}
    for name, params in SUBJECTS.items():
        r = rig(runner=LogitsRunner)
        r.engine.add(request(name, [7, 8, 9, 7], max_tokens=14, **params))
        r.run()
        found[name] = outcome(r, name)
    return found


@pytest.mark.parametrize("size", ["ample", "tight"])
def test_the_same_tokens_and_logprobs_in_a_crowd(quiet: dict[str, list[Any]], size: str) -> None:
    tight = {"blocks": 14, "block_size": 4, "budget": 12, "max_num_seqs": 12}
    r = rig(runner=LogitsRunner, **(tight if size == "tight" else {}))
    for i, (name, params) in enumerate(SUBJECTS.items()):
        r.engine.add(request(name, [7, 8, 9, 7], max_tokens=14, **params))
        r.engine.add(request(f"x{i}", 11, max_tokens=9, temperature=i % 2, priority=-1))
        r.step()
    r.run()
    if size == "tight":
        assert r.scheduler.stats().preemptions > 3
    for name in SUBJECTS:
        assert outcome(r, name) == quiet[name], name
    assert len({tuple(t) for t, _ in quiet["family"]}) == 3


# ----------------------------------------------------------------------- changed logits


def plain_penalties(row: np.ndarray, s: Sequence) -> np.ndarray:
    p, row = s.request.params, row.astype(np.float64).copy()
    output = s.tokens[s.num_prompt : s.num_tokens].tolist()
    for t in set(s.tokens[: s.num_tokens].tolist()):
        row[t] = row[t] / p.repetition_penalty if row[t] > 0 else row[t] * p.repetition_penalty
    for t in set(output):
        row[t] -= p.frequency_penalty * output.count(t) + p.presence_penalty
    return row


def changed(
    logits: torch.Tensor, *sequences: Sequence, using: Sampler | None = None
) -> torch.Tensor:
    """The logits that the draw would see."""
    seen: list[torch.Tensor] = []

    def spy(rows: torch.Tensor, inputs: SampleInputs) -> torch.Tensor:
        seen.append(rows.clone())
        return ops.sample(rows, inputs)

    made = using or sampler()
    made._sample = spy
    draw(logits, *sequences, using=made)
    return seen[0]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"frequency_penalty": -0.5, "presence_penalty": -1.0, "repetition_penalty": 0.7},
    ],
)
def test_penalties(params: dict) -> None:
    """Repetition on prompt and output, presence and frequency on the output alone."""
    logits = distinct_logits(1, rows=3)
    rows = [
        sequence([4, 4, 4, 9], None, **params),
        sequence([4, 4, 4], [5, 6, 5, 4], **params),
        sequence([30], [30] * 5, **params),
    ]
    got = changed(logits, *rows)
    for i, row in enumerate(rows):
        assert np.allclose(got[i], plain_penalties(logits[i].numpy(), row), atol=1e-5)
    if "repetition_penalty" not in params:
        assert torch.equal(got[0], logits[0])


def test_penalties_follow_the_output_as_it_grows() -> None:
    s = sequence([1, 2], [3], frequency_penalty=0.5, repetition_penalty=1.2)
    for token in (3, 3, 1, 40):
        logits = distinct_logits(token)
        assert np.allclose(changed(logits, s)[0], plain_penalties(logits[0].numpy(), s), atol=1e-5)
        s.append(token)


def test_a_neighbour_without_penalties_is_untouched() -> None:
    logits = distinct_logits(2, rows=3)
    rows = [sequence([1], [2]), sequence([1], [2], presence_penalty=2.0), sequence([2], [1])]
    got = changed(logits, *rows)
    assert torch.equal(got[[0, 2]], logits[[0, 2]]) and not torch.equal(got[1], logits[1])


def test_logit_bias_bans_and_forces() -> None:
    logits = distinct_logits(2)
    best = int(logits[0].argmax())
    assert int(draw(logits, sequence(logit_bias={best: -100.0})).tokens[0]) != best
    for t in (0.0, 1.0):
        assert int(draw(logits, sequence(temperature=t, logit_bias={17: 100.0})).tokens[0]) == 17
    got = changed(logits, sequence(logit_bias={3: 1.5, 4: -2.0}))
    assert got[0, 3] == logits[0, 3] + 1.5 and got[0, 4] == logits[0, 4] - 2.0


def test_allowed_tokens() -> None:
    logits = distinct_logits(4)
    allowed = [3, 30, 31]
    best = max(allowed, key=lambda t: float(logits[0, t]))
    assert int(draw(logits, sequence(allowed_token_ids=allowed)).tokens[0]) == best
    tokens = {int(draw(logits, sequence(allowed_token_ids=allowed, temperature=9.0, seed=s)).tokens[0]) for s in range(60)}  # fmt: skip
    assert tokens == set(allowed)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_no_stop_token_before_min_tokens(ignore_eos: bool) -> None:
    logits = torch.zeros(1, V)
    logits[0, [2, 7, 9, 11]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    fields: dict[str, Any] = {
        "eos": (2, 7), "min_tokens": 5, "stop_token_ids": [9], "ignore_eos": ignore_eos,
    }  # fmt: skip
    for made in range(7):
        token = int(draw(logits, sequence([1], [20] * made, **fields)).tokens[0])
        assert token == (2 if ignore_eos or made >= 5 else 11), made


def test_when_nothing_is_allowed_the_draw_fails_alone() -> None:
    logits = distinct_logits(4, rows=2)
    index = VocabularyIndex([bytes([65 + i]) for i in range(V)])
    using = sampler(lambda skip: index)
    stuck = sequence([1, 2], allowed_token_ids=[3], bad_words=["D"])
    tokens = draw(logits, stuck, sequence(), using=using).tokens.tolist()
    assert tokens == [-1, int(logits[1].argmax())]


# ---------------------------------------------------------------------- logits that are broken


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_broken_logits_fail_alone(value: float, temperature: float, logprobs: int | None) -> None:
    logits = distinct_logits(6, rows=3)
    clean = [int(logits[i].argmax()) for i in (0, 2)]
    logits[1, 11] = value
    rows = [sequence(), sequence(temperature=temperature, logprobs=logprobs, top_k=3), sequence()]
    assert draw(logits, *rows).tokens.tolist() == [clean[0], -1, clean[1]]


def test_all_minus_infinity_fails() -> None:
    logits = torch.full((1, V), -math.inf)
    for t in (0.0, 1.0):
        assert draw(logits, sequence(temperature=t)).tokens.tolist() == [-1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_behind_a_mask_are_not_reported_as_numbers(value: float) -> None:
    logits = distinct_logits(6)
    logits[0, 11] = value
    row = sequence(allowed_token_ids=[3, 4], logprobs=2)
    assert draw(logits, row).tokens.tolist() == [-1]


# ------------------------------------------------------------------------- log-probabilities


def test_zero_and_none_are_different() -> None:
    logits = distinct_logits(7, rows=3)
    result = draw(logits, sequence(logprobs=0), sequence(), sequence(logprobs=2))
    first, second, third = result.logprobs
    assert second is None
    assert first is not None and (first.top_ids, first.top_logprobs) == ([], [])
    assert third is not None and len(third.top_ids) == 2
    assert first.token_id == int(logits[0].argmax()) and first.rank == 1
    assert draw(logits[:1], sequence()).logprobs in ([], ())


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"temperature": 1.0, "top_k": 1}, {"logit_bias": {5: 50.0}},
     {"allowed_token_ids": [8, 9]}, {"repetition_penalty": 2.0}, {"temperature": 0.5, "top_p": 0.1}],
)  # fmt: skip
def test_values_come_from_the_raw_logits(params: dict) -> None:
    """Whatever a draw does to logits, log-probabilities are the model's own: log-softmax of the raw row."""
    logits = distinct_logits(8)
    raw = torch.log_softmax(logits[0].double(), 0)
    (entry,) = draw(logits, sequence([1], [2], logprobs=-1, **params)).logprobs
    assert entry is not None
    order = torch.argsort(raw, descending=True).tolist()
    assert entry.top_ids == order
    assert np.allclose(entry.top_logprobs, raw[order], atol=1e-5)
    assert abs(sum(math.exp(x) for x in entry.top_logprobs) - 1) < 1e-5
    assert abs(entry.logprob - float(raw[entry.token_id])) < 1e-5
    assert entry.rank == order.index(entry.token_id) + 1


def test_more_logprobs_than_tokens() -> None:
    (entry,) = token_logprobs(torch.zeros(1, 4), np.array([2]), [20], Ops())
    assert sorted(entry.top_ids) == [0, 1, 2, 3]


def test_half_precision_logits_give_float32_logprobs() -> None:
    logits = distinct_logits(8).bfloat16()
    (entry,) = draw(logits, sequence(logprobs=1)).logprobs
    raw = torch.log_softmax(logits[0].double(), 0)
    assert entry is not None and abs(entry.logprob - float(raw.max())) < 1e-5


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_what_a_sampler_keeps_between_steps_changes_nothing(data: st.DataObject) -> None:
    """Rows come, go and change places from step to step; a sampler that has seen others draws what a
    new one draws."""
    kept = sampler()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 5, "logprobs": 2},
        {"temperature": 0.7, "n": 3},
    ]
    known = [
        sequence([1, 2, 3], seed=i, **data.draw(st.sampled_from(kinds)))
        for i in range(data.draw(st.integers(1, 5)))
    ]
    for step in range(data.draw(st.integers(2, 6))):
        chosen = data.draw(st.permutations(known))[: data.draw(st.integers(1, len(known)))]
        rows = sum(s.pending_samples for s in chosen)
        logits = distinct_logits(step, rows)
        got = draw(logits, *chosen, using=kept)
        wanted = draw(logits, *chosen)
        assert got.tokens.tolist() == wanted.tokens.tolist() and got.logprobs == wanted.logprobs
        for s in chosen:
            s.append(step)
            s.pending_samples = 1


def test_plain_greedy_rows_share_their_inputs() -> None:
    """The usual step builds nothing for its rows."""
    seen: list[SampleInputs] = []

    def watch(logits: torch.Tensor, inputs: SampleInputs) -> torch.Tensor:
        seen.append(inputs)
        return ops.sample(logits, inputs)

    using = Sampler(watch, Ops(), "cpu", no_vocabulary)
    rows = [sequence(seed=i, temperature=0.0) for i in range(4)]
    for _ in range(3):
        draw(distinct_logits(1, 4), *rows, using=using)
    draw(
        distinct_logits(1, 4),
        *(sequence(seed=9 + i, temperature=0.0) for i in range(4)),
        using=using,
    )
    assert all(inputs is seen[0] for inputs in seen) and seen[0].all_greedy
    assert len(seen[0].temperature) == 4
