"""Speculative decoding over the null runner: whatever is guessed, the tokens are those of plain decoding."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import VOCAB, Rig, request, rig

from octavo.core.config import ConfigError
from octavo.core.drafting.drafter import SpeculativeConfig, make_drafter
from octavo.core.drafting.ngram import NgramDrafter
from octavo.core.drafting.speculation import Speculation
from octavo.core.drafting.times import StepTimes
from octavo.core.sequence import Sequence
from octavo.core.types import SequenceUpdate


class Oracle:
    """Knows what comes, and is right as often as it is told to be."""

    def __init__(
        self, known: dict[tuple[str, int], list[int]], right: float, seed: int = 0
    ) -> None:
        self.known, self.right = known, right
        self.dice = random.Random(seed)
        self.longest = 0

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[list[int]]:
        found = []
        for sequence, count in zip(sequences, counts, strict=True):
            done = sequence.num_output
            coming = self.known[sequence.request.id, sequence.index][done : done + count]
            coming += [0] * (count - len(coming))
            found.append(
                [t if self.dice.random() < self.right else (t + 1) % VOCAB for t in coming]
            )
            self.longest = max(self.longest, count)
        return found


def requests(count: int, **fields: Any) -> list[Any]:
    common = list(range(40))
    return [
        request(
            f"q{i}",
            common[: 9 * (i % 4)] + [i] * (3 + i),
            max_tokens=20 + 3 * i,
            n=1 + (i % 3 == 2),
            temperature=float(i % 2),
            seed=i,
            **fields,
        )
        for i in range(count)
    ]


def plain(asked: list[Any], **limits: Any) -> Rig:
    r = rig(**limits)
    for q in asked:
        r.engine.add(q)
    r.run()
    return r


def speculating(known: Rig, right: float, most: int = 5, **limits: Any) -> tuple[Rig, Speculation]:
    speculation = Speculation(Oracle(dict(known.tokens), right), most)
    return rig(speculation=speculation, **limits), speculation


CROWDS = {
    "ample": {},
    "chunked": {"budget": 16},
    "few rows": {"rows": 12, "max_num_seqs": 4},
    "tight": {"blocks": 16, "block_size": 8, "budget": 40},
    "tight, no cache": {"blocks": 16, "block_size": 8, "prefix_caching": False},
    "tiny blocks": {"blocks": 140, "block_size": 1, "budget": 64},
}


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_the_same_tokens_in_any_crowd(crowd: str, right: float) -> None:
    asked = requests(7, eos=(11, 500))
    known = plain(asked)
    r, speculation = speculating(known, right, **CROWDS[crowd])
    for q in asked:
        r.engine.add(q)
        r.step()
    r.run()
    r.check_empty()
    assert r.tokens == known.tokens
    assert {k: (u.finish_reason, u.stop_reason) for k, u in r.finished.items()} == {
        k: (u.finish_reason, u.stop_reason) for k, u in known.finished.items()
    }
    assert speculation.drafted > 0
    if right != 0.5:
        assert (speculation.accepted > 0) == (right == 1)
    if "tight" in crowd:
        assert r.scheduler.stats().preemptions > 0


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.integers(2, 9),
    st.sampled_from([10, 14, 40, 200]),
    st.sampled_from([0.3, 0.8, 1.0]),
    st.integers(12, 60),
)
def test_any_draft_anywhere(
    seed: int, most: int, size: int, blocks: int, right: float, budget: int
) -> None:
    """Aborts in the middle, too; the blocks are audited after every step."""
    dice = random.Random(seed)
    asked = [
        request(f"q{i}", dice.randint(1, 30), max_tokens=dice.randint(1, 30), n=dice.choice([1, 1, 2]),
                seed=i, temperature=1.0, eos=(3,))
        for i in range(6)
    ]  # fmt: skip
    limits = {"blocks": blocks * 16 // size + 1, "block_size": size, "budget": budget}
    known = plain(asked)
    r, _ = speculating(known, right, most, **limits)
    for q in asked:
        r.engine.add(q)
    gone = asked[dice.randrange(6)].id
    for _ in range(dice.randint(1, 12)):
        r.step()
    r.take(r.engine.abort([gone]))
    r.scheduler.check()
    r.run()
    r.check_empty()
    for key, tokens in r.tokens.items():
        expected = known.tokens[key]
        assert tokens == (expected[: len(tokens)] if key[0] == gone else expected)


def test_fewer_steps_and_who_counts_them() -> None:
    asked = [request("q", 10, max_tokens=61, ignore_eos=True)]
    known = plain(asked)
    r, speculation = speculating(known, 1.0, most=5)
    r.engine.add(asked[0])
    assert r.run() == 11  # the prompt brings the first, each draft of 5 brings 6
    [update] = r.finished.values()
    assert update.timings is not None
    assert update.timings.num_accepted_tokens == update.timings.num_drafted_tokens == 50
    stats = r.engine.stats()
    assert (stats.drafts, stats.drafted_tokens, stats.accepted_tokens) == (10, 50, 50)
    assert speculation.accepted == 50


def test_an_end_inside_a_draft() -> None:
    """What was right behind it is nobody's; the last token allowed is never exceeded."""
    for fields, length in (({"stop_token_ids": [8]}, 8), ({"max_tokens": 7}, 7)):
        fields = {"max_tokens": 50, **fields}
        r, speculation = speculating(plain([]), 1.0, most=9)
        r.runner.forced["q"] = list(range(1, 60))
        speculation.drafter = Oracle({("q", 0): list(range(1, 60))}, 1.0)
        r.engine.add(request("q", 5, ignore_eos=True, **fields))
        r.run()
        r.check_empty()
        assert r.tokens["q", 0] == list(range(1, length + 1))


def test_a_sample_that_is_ended_between_its_tokens() -> None:
    """A stop string is found outside: later tokens of the same step may still be on their way."""
    asked = [request("q", 5, max_tokens=40, ignore_eos=True)]
    r, _ = speculating(plain(asked), 1.0, most=6)
    r.engine.add(asked[0])
    r.step()
    updates: list[SequenceUpdate] = r.engine.step()
    assert len(updates) == 7
    r.take([*updates, *r.engine.abort([("q", 0)])])
    r.check_empty()


@pytest.mark.parametrize(
    "fields", [{"repetition_penalty": 1.2}, {"presence_penalty": 1.0}, {"bad_words": ["x"]}]
)
def test_who_gets_no_draft(fields: dict[str, Any]) -> None:
    asked = [request("q", 5, max_tokens=20, **fields), request("free", 5, max_tokens=20)]
    known = plain(asked)
    r, speculation = speculating(known, 1.0)
    for q in asked:
        r.engine.add(q)
    r.run()
    assert r.tokens == known.tokens
    [timings] = [u.timings for k, u in r.finished.items() if k[0] == "q"]
    assert timings is not None and timings.num_drafted_tokens == 0
    assert speculation.accepted > 0


# ---------------------------------------------------------------------------------------- adaptive


class Timed(Speculation):
    """Has a clock by which every token beside the first of each of `streams` sequences costs `cost` of a step,
    and says so beforehand."""

    def __init__(self, drafter: Any, most: int, cost: float, streams: int) -> None:
        self.clock = StepTimes([(streams, 1.0), (streams + 100, 1.0 + 100 * cost)])
        super().__init__(drafter, most, StepTimes(self.clock.curve))

    def observe(self, plan: Any, seconds: float) -> None:
        super().observe(plan, self.clock.of(plan.num_tokens))


class Model(Oracle):
    """An oracle that is alike to all, and knows a sequence only once it has drafted for it."""

    alike = True
    once_seconds = 0.0

    def __init__(self, known: dict[tuple[str, int], list[int]], right: float) -> None:
        super().__init__(known, right)
        self.times = Untimed()
        self.computed: set[tuple[str, int]] = set()

    def missing(self, sequence: Sequence) -> int:
        return 0 if (sequence.request.id, sequence.index) in self.computed else sequence.num_tokens

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[list[int]]:
        self.computed |= {(s.request.id, s.index) for s in sequences}
        return super().propose(sequences, counts)


class Terse(Oracle):
    """Says no more than that it is alike."""

    alike = True


class Untimed(StepTimes):
    """What was said beforehand, and not what this machine takes for an oracle."""

    def observe(self, tokens: int, seconds: float) -> None:
        assert tokens > 0 and seconds >= 0


@pytest.mark.parametrize("kind", [Oracle, Model, Terse])
def test_whatever_a_drafter_holds_goes_with_the_engine(kind: type[Oracle]) -> None:
    class Holding(kind):  # type: ignore[valid-type, misc]  # made from a parameter
        held = True

        def close(self) -> None:
            self.held = False

    drafter = Holding({}, 1.0)
    r = rig(speculation=Speculation(drafter, 3))
    assert drafter.held
    r.engine.shutdown()
    assert not drafter.held


def adaptive(
    right: float, cost: float, streams: int = 1, steps: int = 400, length: int = 700
) -> Speculation:
    """A run in which every token beside the first of each sequence costs `cost` of a step. length: tokens
    of each that the drafter knows; behind them it is wrong."""
    asked = [request(f"q{i}", 4, max_tokens=3000, ignore_eos=True) for i in range(streams)]
    known = plain(
        [request(q.id, 4, max_tokens=length, ignore_eos=True) for q in asked], max_model_len=4096
    )
    speculation = Timed(Oracle(dict(known.tokens), right), 8, cost, streams)
    r = rig(speculation=speculation)
    for q in asked:
        r.engine.add(q)
    for _ in range(steps):
        r.step()
    return speculation


def test_it_drafts_as_long_as_that_pays() -> None:
    assert adaptive(right=0.95, cost=0.02, steps=200, length=1800).drafted > 175 * 6
    dear = adaptive(right=0.5, cost=0.6)
    assert dear.drafted < 60, "each token costs more than it brings"
    wrong = adaptive(right=0.0, cost=0.1)
    assert wrong.drafted < 100
    many = adaptive(right=0.9, cost=0.2, streams=16, steps=150)
    assert many.drafted < 16 * 60


@pytest.mark.parametrize("kind", [Oracle, Model, Terse])
def test_what_a_draft_model_was_worth_to_others_counts(kind: type[Oracle]) -> None:
    """A drafter that is never right: each sequence tries for itself, or the next ones hardly any more."""
    asked = [request(f"q{i}", 4, max_tokens=40, ignore_eos=True) for i in range(24)]
    known = plain([request(q.id, 4, max_tokens=60, ignore_eos=True) for q in asked])
    speculation = Timed(kind(dict(known.tokens), 0.0), 8, 0.1, 1)
    r = rig(speculation=speculation)
    tried = []
    for q in asked:
        before = speculation.drafts
        r.engine.add(q)
        r.run()
        tried.append(speculation.drafts - before)
    assert len(r.tokens) == len(asked)
    first, last = sum(tried[:4]), sum(tried[-4:])
    alike = kind is not Oracle
    assert last <= first / 4 if alike else last >= first / 2
    assert first >= (2 if alike else 8)


def alike(
    right: float,
    streams: int,
    steps: int,
    cost: float = 0.3,
    own: float = 0.0,
    most_tokens: int = 3000,
    length: int = 1800,
) -> tuple[Speculation, list[tuple[int, int]]]:
    """A run with a drafter that is alike to all; and of each step the drafts that it had. own: what each
    token takes the drafter. length: tokens of each that it knows."""
    asked = [
        request(f"q{i}", 40 + i, max_tokens=most_tokens, ignore_eos=True) for i in range(streams)
    ]
    known = plain(
        [request(q.id, 40 + i, max_tokens=length, ignore_eos=True) for i, q in enumerate(asked)],
        max_model_len=4096,
    )
    model = Model(dict(known.tokens), right)
    model.times.curve = [(1, own)]
    speculation = Timed(model, 8, cost, streams)
    r = rig(speculation=speculation, blocks=4096)
    for q in asked:
        r.engine.add(q)
    made = []
    for _ in range(steps):
        before = speculation.drafts, speculation.drafted
        r.step()
        made.append((speculation.drafts - before[0], speculation.drafted - before[1]))
    return speculation, made


@pytest.mark.parametrize("streams", [1, 16])
def test_a_draft_model_that_guesses_badly_costs_next_to_nothing(streams: int) -> None:
    speculation, made = alike(0.02, streams, 1500, cost=0.5 / streams, length=200)
    assert 2 <= speculation.drafted <= 40
    assert max(drafts for drafts, _ in made) == 1, "one sequence tries it for all"
    tries = [i for i, (drafts, _) in enumerate(made) if drafts]
    gaps = [b - a for a, b in itertools.pairwise(tries) if b - a > 50]
    assert len(gaps) >= 3 and all(b > 1.7 * a for a, b in itertools.pairwise(gaps))


def test_a_draft_model_is_not_asked_where_no_guess_could_pay() -> None:
    """A step of 16 takes as much more as each token brings, or its tokens take too long themselves."""
    for cost, own in ((1 / 16, 0.0), (0.01, 0.1)):
        speculation, _ = alike(1.0, 16, 250, cost, own, length=100)
        assert speculation.drafted == 0
    speculation, _ = alike(1.0, 16, 20, cost=0.01, own=0.001, length=100)
    assert speculation.drafted > 0


def test_a_prompt_is_computed_for_drafts_only_if_the_answer_wins_that_back() -> None:
    few, _ = alike(0.9, 1, 250, cost=0.1, own=0.2, most_tokens=15, length=100)
    assert few.drafted == 0, "40 tokens of the drafter cost 8 steps"
    many, _ = alike(0.9, 1, 100, cost=0.1, own=0.2, most_tokens=200, length=400)
    assert many.accepted > 40


def test_a_draft_model_that_guesses_well_is_soon_used_by_all() -> None:
    speculation, made = alike(0.9, 4, 100, cost=0.1)
    assert max(drafts for drafts, _ in made[-20:]) == 4
    assert speculation.accepted / speculation.drafted > 0.6
    alone, made = alike(0.95, 1, 100, cost=0.05)
    assert max(tokens for _, tokens in made[-20:]) == 8, "drafts grow as long as that pays"
    assert alone.accepted > 400


def test_a_draft_model_that_was_given_up_is_taken_up_again_when_it_guesses_well() -> None:
    asked = request("q", 4, max_tokens=3000, ignore_eos=True)
    known = plain([request("q", 4, max_tokens=2900, ignore_eos=True)], max_model_len=4096)
    model = Model(dict(known.tokens), 0.0)
    speculation = Timed(model, 8, 0.1, 1)
    r = rig(speculation=speculation)
    r.engine.add(asked)
    for _ in range(500):
        r.step()
    assert speculation.accepted == 0
    model.right = 1.0
    for _ in range(1000):
        r.step()
    assert speculation.accepted > 200


# ------------------------------------------------------------------------------------------ times


def test_what_a_step_takes() -> None:
    times = StepTimes([(1, 1.0), (4, 1.0), (8, 2.0), (16, 4.0)])
    assert [times.of(n) for n in (1, 3, 6, 16, 40)] == [1.0, 1.0, 1.5, 4.0, 10.0]
    for _ in range(100):  # with longer contexts all sizes take longer
        times.observe(4, 1.5)
    assert times.of(4) == 1.5
    assert times.of(6) == pytest.approx(2.25) and times.of(40) == pytest.approx(15.0)
    times.observe(6, 1.0)  # seen: it counts for itself
    assert times.of(6) == 1.0
    times.observe(4, 100.0)  # a neighbour's noise
    assert times.of(4) < 2.0 and times.of(16) < 8.0
    assert StepTimes().of(5) == 0.0


# ------------------------------------------------------------------------------------------ n-grams


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(request("q", tokens), 0, b"", 0, 10**6)


def lookup(drafter: NgramDrafter, made: Sequence, count: int) -> list[int]:
    return drafter.propose([made], [count])[0]


def test_what_followed_the_longest_match_last() -> None:
    drafter = NgramDrafter(SpeculativeConfig("ngram", prompt_lookup_min=2, prompt_lookup_max=3))
    made = sequence([1, 2, 3, 4, 9, 2, 3, 5, 8, 8, 2, 3])
    assert lookup(drafter, made, 3) == [5, 8, 8]  # the latest
    made.append(4)
    assert lookup(drafter, made, 2) == [9, 2]  # 2 3 4 was followed by 9
    made.append(7)
    assert lookup(drafter, made, 2) == []
    for token in (1, 2):
        made.append(token)
    assert lookup(drafter, made, 4) == [3, 4, 9, 2]


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    drafter = NgramDrafter(SpeculativeConfig("ngram"))
    assert lookup(drafter, sequence([5, 6, 7] * 4), 7) == [5, 6, 7, 5, 6, 7, 5]
    assert lookup(drafter, sequence([4] * 9), 5) == [4] * 5


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 6))
def test_the_index_finds_what_a_scan_finds(tokens: list[int], count: int) -> None:
    """However the text came: at once or token by token."""
    drafter = NgramDrafter(SpeculativeConfig("ngram", prompt_lookup_min=1, prompt_lookup_max=4))
    whole = lookup(drafter, sequence(tokens), count)
    grown = sequence(tokens[:1])
    lookup(drafter, grown, count)
    for token in tokens[1:]:
        grown.append(token)
        found = lookup(drafter, grown, count)
    if len(tokens) > 1:
        assert found == whole
    for size in (4, 3, 2, 1):
        ends = [i for i in range(size, len(tokens)) if tokens[i - size : i] == tokens[-size:]]
        if ends and len(tokens) >= size:
            expected = tokens[ends[-1] :]
            period = list(expected)
            while len(expected) < count:
                expected += period
            assert whole == expected[:count]
            return
    assert whole == []


# ------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs a method"),
        ({"method": 3}, "needs a method"),
        ({"method": "ngram", "num_speculative_token": 4}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 64, got 0"),
        ({"method": "ngram", "num_speculative_tokens": True}, "from 1 to 64, got True"),
        ({"method": "ngram", "prompt_lookup_min": 5}, "exceeds prompt_lookup_max"),
        ({"method": "ngram", "adaptive": "no"}, "adaptive must be true or false"),
    ],
)
def test_what_cannot_be_used(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse(given)


def test_a_method_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ngram'"):
        make_drafter(SpeculativeConfig("n-gram"), {})
    made = make_drafter(
        SpeculativeConfig("mine"), {"mine": f"{NgramDrafter.__module__}:NgramDrafter"}
    )
    assert isinstance(made, NgramDrafter)
