"""The whole conformance kit over a backend whose device is not there: on a stand-in, or interpreted."""

from __future__ import annotations

from pathlib import Path

from octavo.plugins import Backend
from octavo.plugins.conformance.run import check
from octavo.plugins.conformance.scorecard import Execution, Result, Scorecard


def whole_kit(
    backend: Backend, device: str, execution: Execution, path: Path, not_offered: set[str]
) -> Scorecard:
    """Every check passes, those of `not_offered`'s operations apart, and the scorecard says where it ran. It is
    written to `path`, also when a check failed; speeds are left out: they are not the device's."""

    def tell(result: Result, of: int) -> None:
        print(f"{result.id} {result.state} {result.seconds:.1f} s {result.detail}", flush=True)

    word = f"{backend.name} --device {device}"
    card = check(backend, device, word=word, tell=tell, speed=False)
    card.write(path)
    assert card.passed, [(row.failing, row.detail) for row in card.failed]
    assert card.execution == execution
    assert {row.execution for row in card.rows if row.group == "op"} == {execution}
    for group in ("contract", "op", "engine"):
        assert any(row.group == group and row.state == "passed" for row in card.rows), group
    left = {row.op for row in card.rows if row.group != "contract" and row.state != "passed"}
    assert left == not_offered
    return card
