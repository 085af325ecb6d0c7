"""Detokenised text, stop strings, logprobs and the merging of samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
from null_engine import EOS, byte_tokenizer

from octavo.core.output import OutputProcessor, merge_outputs
from octavo.core.params import RequestOutputKind, SamplingParams
from octavo.core.types import RequestOutput, SequenceUpdate, TokenLogprobs

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False)


def make(**params: Any) -> OutputProcessor:
    processor = OutputProcessor(byte_tokenizer())
    processor.add("r", "p", ids_of("p"), SamplingParams(max_tokens=None, **params))
    return processor


def update(ids: list[int], reason: Any = None, index: int = 0, **more: Any) -> SequenceUpdate:
    return SequenceUpdate(request_id="r", index=index, token_ids=ids, finish_reason=reason, **more)


def drive(processor: OutputProcessor, updates: list[SequenceUpdate]) -> Any:
    outputs: list[RequestOutput] = []
    aborts: list[Any] = []
    for one in updates:
        new, ended = processor.process([one])
        outputs += [output for _, output in new]
        aborts += ended
    return outputs, aborts


def bytewise(text: str, reason: Any = "length") -> list[SequenceUpdate]:
    ids = ids_of(text)
    return [update([t], reason if i == len(ids) - 1 else None) for i, t in enumerate(ids)]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_deltas_never_hold_half_a_character(logprobs: int | None) -> None:
    """A text of multi-byte characters, one byte a token."""
    text = "散効客单价🙂👩‍👩‍👧"
    outputs, _ = drive(make(output_kind=DELTA, logprobs=logprobs), bytewise(text))
    deltas = [output.outputs[0].text for output in outputs]
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)


def test_cumulative_and_final_outputs_agree() -> None:
    outputs, _ = drive(make(), bytewise("hello"))
    assert [o.outputs[0].text for o in outputs] == ["h", "he", "hel", "hell", "hello"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3, 4, 5]  # snapshots
    final, _ = drive(make(output_kind=FINAL), bytewise("hello"))
    assert len(final) == 1 and final[0].finished
    assert final[0].outputs[0] == outputs[-1].outputs[0]


@pytest.mark.parametrize("reason", ["length", "abort", "stop"])
@pytest.mark.parametrize("cut", [0, 1])
def test_a_final_output_has_the_text_of_all_that_came(reason: str, cut: int) -> None:
    """Also of what ended inside a character, and where the last update brings no token."""
    ids = ids_of("散🙂é")[: -cut or None]
    updates = [*(update([t]) for t in ids), update([], reason)]
    texts = {}
    for kind in (DELTA, FINAL):
        outputs, _ = drive(make(output_kind=kind), updates)
        texts[kind] = "".join(output.outputs[0].text for output in outputs)
    assert texts[DELTA] == texts[FINAL] == ("散🙂\ufffd" if cut else "散🙂é")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", [DELTA, FINAL])
def test_a_stop_string_ends_the_sample_where_it_begins(
    include: bool, kind: RequestOutputKind
) -> None:
    """The stop may end inside a token and span several."""
    processor = make(stop=["Pari"], include_stop_str_in_output=include, output_kind=kind)
    outputs, aborts = drive(
        processor, [update(ids_of("in P")), update(ids_of("aris, ")), update(ids_of("France"))]
    )
    text = "".join(o.outputs[0].text for o in outputs)
    assert text == ("in Pari" if include else "in ")
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "Pari")
    assert aborts == [("r", 0)]
    # The token that completed the stop counts, those after it do not.
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == len("in Pari")
    assert len(processor) == 0


def test_a_stop_inside_one_multi_byte_token() -> None:
    ids = ids_of("ab")
    processor = make(stop="b", output_kind=FINAL)
    outputs, aborts = drive(processor, [update(ids, "length")])
    assert outputs[0].outputs[0].text == "a"
    assert outputs[0].outputs[0].finish_reason == "stop"
    assert aborts == []  # the engine has ended it by itself


def test_only_what_could_begin_a_stop_is_held_back() -> None:
    processor = make(stop=["\n\nObservation:"], output_kind=DELTA)
    outputs, _ = drive(processor, bytewise("Hello\nworld\n"))
    deltas = [o.outputs[0].text for o in outputs]
    assert deltas == ["H", "e", "l", "l", "o", "", "\nw", "o", "r", "l", "d", "\n"]


def test_stop_strings_wait_for_min_tokens() -> None:
    processor = make(stop="x", min_tokens=3, output_kind=FINAL)
    outputs, _ = drive(processor, bytewise("xxxaxb"))
    assert outputs[0].outputs[0].text == "xxxa"
    assert len(outputs[0].outputs[0].token_ids) == 5


def test_the_token_that_stops_is_counted_and_not_shown() -> None:
    stop_id = ids_of("!")[0]
    for include in (False, True):
        processor = make(
            stop_token_ids=[stop_id], include_stop_str_in_output=include, output_kind=FINAL
        )
        outputs, _ = drive(processor, [update(ids_of("hi!"), "stop", stop_reason=stop_id)])
        sample = outputs[0].outputs[0]
        assert sample.text == ("hi!" if include else "hi")
        assert len(sample.token_ids) == 3 and sample.stop_reason == stop_id
    outputs, _ = drive(make(output_kind=FINAL), [update([*ids_of("hi"), EOS], "stop")])
    assert outputs[0].outputs[0].text == "hi"


def test_one_sample_of_three_stops_and_the_others_go_on() -> None:
    processor = make(n=3, stop="b", output_kind=FINAL)
    outputs, aborts = processor.process([update(ids_of(c), None, i) for i, c in enumerate("abc")])
    assert (outputs, aborts) == ([], [("r", 1)])
    # The engine's last words on the sample that was aborted are dropped.
    outputs, aborts = processor.process(
        [update(ids_of("x"), "length", 2), update([], "abort", 1), update(ids_of("y"), "length", 0)]
    )
    [(name, output)] = outputs
    assert (name, output.finished, aborts) == ("r", True, [])
    assert [(s.index, s.text, s.finish_reason) for s in output.outputs] == [
        (0, "ay", "length"),
        (1, "", "stop"),
        (2, "cx", "length"),
    ]


def test_logprobs_put_the_chosen_token_first_and_name_no_token_twice() -> None:
    """logprobs=0 is the chosen token alone."""
    a, b, c = ids_of("abc")
    entry = TokenLogprobs(b, -1.5, 2, [a, b], [-0.5, -1.5])
    processor = make(logprobs=2, output_kind=FINAL)
    outputs, _ = drive(processor, [update([b], "length", logprobs=[entry])])
    sample = outputs[0].outputs[0]
    assert sample.cumulative_logprob == -1.5
    [at] = sample.logprobs
    assert list(at) == [b, a]
    assert (at[a].rank, at[a].decoded_token, at[b].rank) == (1, "a", 2)
    alone = TokenLogprobs(c, -3.0, 9, [], [])
    outputs, _ = drive(
        make(logprobs=0, output_kind=FINAL), [update([c], "length", logprobs=[alone])]
    )
    [at] = outputs[0].outputs[0].logprobs
    assert list(at) == [c] and at[c].logprob == -3.0


def test_prompt_logprobs_begin_with_none() -> None:
    entry = TokenLogprobs(5, -math.inf, 3, [5], [-math.inf])
    processor = make(prompt_logprobs=1, output_kind=FINAL)
    outputs, _ = drive(processor, [update(ids_of("x"), "length", prompt_logprobs=[entry])])
    first, second = outputs[0].prompt_logprobs
    assert first is None and second[5].rank == 3


def test_unfetched_deltas_are_joined_sample_by_sample() -> None:
    processor = make(n=2, output_kind=DELTA, logprobs=0)
    steps = []
    for text, reason in (("a", None), ("b", "length")):
        entries = [TokenLogprobs(ids_of(text)[0], -1.0, 1, [], [])]
        new, _ = processor.process(
            [update(ids_of(text), reason, i, logprobs=entries) for i in (1, 0)]
        )
        steps += [output for _, output in new]
    merged = merge_outputs(steps, DELTA)
    assert merged.finished
    assert [(s.index, s.text, len(s.logprobs or ())) for s in merged.outputs] == [
        (0, "ab", 2),
        (1, "ab", 2),
    ]


def test_updates_of_unknown_requests_are_dropped() -> None:
    processor = make()
    processor.discard("r")
    assert processor.process([update([5])]) == ([], [])
