"""Stop strings in streamed text: found wherever they lie, and nothing held back for long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.stop import StopChecker


def run(
    stops: list[str], pieces: list[str], include_stop: bool = False
) -> tuple[list[str], str | None]:
    """What is given out for each piece, and at the end; and the match."""
    checker = StopChecker(stops, include_stop)
    given_out = [checker.push(piece)[0] for piece in pieces]
    if checker.matched is None:
        given_out.append(checker.flush())
    return given_out, checker.matched


def test_match_inside_a_token() -> None:
    assert run(["Pari"], ["The", " Paris", " x"]) == (["The", " ", ""], "Pari")


def test_match_over_three_tokens() -> None:
    assert run(["ab cd"], ["x a", "b c", "d e"]) == (["x ", "", ""], "ab cd")
    assert run(["ab cd"], ["x a", "b c", "d e"], include_stop=True) == (
        ["x ", "", "ab cd"],
        "ab cd",
    )


def test_only_a_possible_beginning_is_held_back() -> None:
    stop = "\n\nObservation:"
    assert run([stop], ["Hello", " world"]) == (["Hello", " world", ""], None)
    assert run([stop], ["a\n", "b\n\nOb", "x"]) == (["a", "\nb", "\n\nObx", ""], None)
    assert run(["aab"], ["aaa", "a", "b!"]) == (["a", "a", ""], "aab")
    assert run(["abcd"], ["ab"]) == (["", "ab"], None)


def test_first_to_end_wins_then_the_longest() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], "bc")
    assert run(["bc", "abc"], ["xabc"]) == (["x"], "abc")
    assert run(["later", "now"], ["now or later"])[1] == "now"


def test_unchecked_text_passes_and_begins_no_match() -> None:
    checker = StopChecker(["ab"])
    assert checker.push("xa", check=False) == ("xa", None)
    assert checker.push("b") == ("b", None)
    assert checker.push("a") == ("", None)
    assert checker.push("b", check=False) == ("ab", None)
    assert checker.push("abz") == ("", "ab")
    assert checker.push("more") == ("", "ab") and checker.flush() == ""


def test_no_and_empty_stops() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])


text = st.text(alphabet="ab\n", max_size=24)


@given(
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(text, max_size=8),
    include_stop=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_any_cutting_gives_the_same(
    stops: list[str], pieces: list[str], include_stop: bool
) -> None:
    whole = "".join(pieces)
    out, matched = run(stops, pieces, include_stop)
    once, matched_once = run(stops, [whole], include_stop)
    assert ("".join(out), matched) == ("".join(once), matched_once)
    # against the definition, told character by character
    ends = [
        (end, stop)
        for end in range(1, len(whole) + 1)
        for stop in sorted(stops, key=len, reverse=True)
        if whole[:end].endswith(stop)
    ]
    if ends:
        end, stop = ends[0]
        assert matched == stop
        assert "".join(out) == whole[: end if include_stop else end - len(stop)]
    else:
        assert matched is None and "".join(out) == whole


@given(stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1), body=text)
def test_held_back_is_the_longest_open_suffix(stops: list[str], body: str) -> None:
    checker = StopChecker(stops)
    out, matched = checker.push(body)
    if matched is None:
        held = body[len(out) :]
        lengths = [
            n
            for n in range(len(body) + 1)
            if any(len(s) > n and s.startswith(body[len(body) - n :]) for s in stops)
        ]
        assert len(held) == max(lengths)
