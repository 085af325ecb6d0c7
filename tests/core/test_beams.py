"""Beam search through the real scheduler, on a model that is a hash function: each outcome is that of a
search written down plainly, whatever the pool's size and the neighbours."""

from __future__ import annotations

import pytest
from beam_support import BeamRunner, beams, check, letters
from support import rig

from octavo.core.params import ParamError, RequestRefused, SamplingParams


@pytest.mark.parametrize("stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_outcome_is_that_of_a_plain_search(stopping: bool | str, penalty: float) -> None:
    made = rig(block_size=4, runner=BeamRunner)
    asked = [
        beams(f"{w}", 5 + w, w, max_tokens=14, early_stopping=stopping, length_penalty=penalty)
        for w in (1, 2, 3, 4, 16)
    ]
    for each in asked:
        made.engine.add(each)
    made.run()
    check(made, asked)
    made.check_empty()
    assert made.runner.copies > 0


@pytest.mark.parametrize("stop", [["b"], ["ea", "ne", "q"]])
@pytest.mark.parametrize("early", [0, 3])
def test_stop_strings_end_beams(stop: list[str], early: int) -> None:
    """As EOS does, wherever they lie behind the first min_tokens tokens."""
    made = rig(block_size=4, runner=BeamRunner)
    made.engine._texts = letters()
    common = {"max_tokens": 14, "stop": stop, "min_tokens": early, "ignore_eos": True}
    asked = [beams(f"{w}", 5 + w, w, **common) for w in (1, 3, 5)]
    asked.append(beams("tokens", 9, 3, **common, stop_token_ids=[*range(0, 900, 7)]))
    for each in asked:
        made.engine.add(each)
    made.run()
    check(made, asked)
    ends = [made.finished[each.id, i].stop_reason for each in asked for i in range(each.params.n)]
    assert set(ends) & set(stop)
    made.engine.shutdown()


def test_a_tokenizer_that_cannot_be_loaded_ends_the_request() -> None:
    made = rig(block_size=4, runner=BeamRunner)
    with pytest.raises(ParamError, match="no tokenizer"):
        made.engine.add(beams("a", 4, 2, max_tokens=4, stop="x"))

    def broken() -> object:
        raise OSError("the disk is gone")

    made.engine._texts = letters()
    made.engine._texts._load = broken  # type: ignore[assignment]
    made.engine.add(beams("a", 4, 2, max_tokens=4, stop="x"))
    made.run()
    assert made.finished["a", 0].finish_reason == "error"
    assert "disk is gone" in str(made.finished["a", 0].stop_reason)
    made.check_empty()


def test_prompt_log_probabilities_come_with_the_best_beam() -> None:
    made = rig(block_size=4, budget=7, runner=BeamRunner)
    asked = beams("a", 20, 3, max_tokens=6, prompt_logprobs=0)
    made.engine.add(asked)
    made.run()
    check(made, [asked])
    entries = made.prompt_logprobs["a"]
    assert [entry.token_id for entry in entries] == asked.prompt_token_ids[1:]
    assert made.finished["a", 0].prompt_logprobs == entries
    assert made.finished["a", 1].prompt_logprobs is None


def test_beams_share_blocks() -> None:
    made = rig(block_size=4, runner=BeamRunner)
    made.engine.add(beams("a", 16, 4, max_tokens=8))
    physical = logical = 0
    while made.engine.has_unfinished():
        made.step()
        tables = [s.blocks for s in made.scheduler.sequences()]
        logical = max(logical, sum(len(table) for table in tables))
        physical = max(physical, len({block for table in tables for block in table}))
    assert 0 < physical < logical


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    made = rig(blocks=20, block_size=4, max_num_seqs=8, runner=BeamRunner)
    with pytest.raises(RequestRefused, match="needs 12 sequences at once, this engine runs 8"):
        made.engine.add(beams("a", 4, 12, max_tokens=4))
    with pytest.raises(RequestRefused, match="8 beams need up to 33 KV blocks"):
        made.engine.add(beams("a", 4, 8, max_tokens=17))
    narrow = rig(budget=6, max_num_seqs=8, runner=BeamRunner)
    with pytest.raises(
        RequestRefused, match="8 beams draw 8 tokens in one step, this engine's hold 6"
    ):
        narrow.engine.add(beams("a", 4, 8, max_tokens=4))
    made.check_empty()


def test_an_aborted_group_gives_everything_back() -> None:
    made = rig(block_size=4, runner=BeamRunner)
    made.engine.add(beams("a", 9, 4, max_tokens=30))
    for _ in range(4):
        made.step()
    ends = made.engine.abort(["a"])
    assert [(u.index, u.finish_reason) for u in ends] == [(i, "abort") for i in range(4)]
    made.check_empty()


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": True, "early_stopping": "later"}, "early_stopping"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "top_p": 0.9}, "top_p"),
        ({"use_beam_search": True, "top_k": 5}, "top_k"),
        ({"use_beam_search": True, "min_p": 0.1}, "min_p"),
        ({"use_beam_search": True, "seed": 0}, "seed"),
    ],
)
def test_parameters_that_contradict_are_refused(values: dict[str, object], param: str) -> None:
    with pytest.raises(ParamError) as refused:
        SamplingParams(**values)
    assert refused.value.param == param
