"""The most blocks that samples and beams held, as the request's metrics tell it."""

from __future__ import annotations

import pytest
from support import request, rig
from test_beams import BeamRunner, beams

from octavo.core.sharing import held
from octavo.core.types import Request


def count(made: object, name: str) -> tuple[int, int]:
    """(physical, logical) blocks of a request now, from its block tables."""
    tables = [s.blocks for s in made.scheduler.sequences() if s.request.id == name]  # type: ignore[attr-defined]
    if len(tables) < 2:
        return 0, 0
    return len({block for table in tables for block in table}), sum(len(t) for t in tables)


def asked_for(kind: str) -> Request:
    if kind == "beams":
        return beams("a", 16, 4, max_tokens=20)
    return request("a", 16, n=4, temperature=1.0, max_tokens=20)


@pytest.mark.parametrize("kind", ["samples", "beams"])
@pytest.mark.parametrize("blocks", [200, 27])
def test_the_peak_is_that_of_an_independent_count(kind: str, blocks: int) -> None:
    made = rig(blocks=blocks, block_size=4, runner=BeamRunner)
    asked = asked_for(kind)
    made.engine.add(asked)
    if blocks < 100:  # a neighbour that takes blocks away
        made.engine.add(request("b", 9, max_tokens=40))
    seen = [(0, 0)]
    made.runner.after = lambda step: seen.append(count(made, "a"))
    while made.engine.has_unfinished():
        made.step()
        made.scheduler.check()
    physical, logical = (max(column) for column in zip(*seen, strict=True))
    told = [made.finished["a", i].timings for i in range(4)]
    last = max(told, key=lambda timings: timings.finished)
    assert (last.peak_blocks, last.peak_logical_blocks) == (physical, logical)
    assert 0 < physical < logical <= 4 * physical
    if kind == "samples" and blocks > 100:  # 4 full blocks of prompt are one for all
        assert (physical, logical) == (4 + 4 * 5, 4 * 9)


def test_nothing_is_told_of_one_sequence_alone() -> None:
    made = rig(block_size=4, runner=BeamRunner)
    made.engine.add(request("a", 16, max_tokens=9))
    made.engine.add(request("b", 16, n=4, temperature=1.0, max_tokens=1))
    made.run()
    for key in (("a", 0), ("b", 0), ("b", 3)):
        timings = made.finished[key].timings
        assert (timings.peak_blocks, timings.peak_logical_blocks) == (0, 0)
    assert not made.scheduler.roster.families
    assert held([]) == (0, 0)
