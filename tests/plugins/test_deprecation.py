"""What is on its way out of the contract works and warns, wherever a plug-in uses it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from octavo.core import contract
from octavo.plugins import (
    Backend,
    Capabilities,
    ExecutionPlan,
    Lane,
    Ops,
    Probe,
    hookimpl,
    hookspecs,
)
from octavo.plugins.deprecation import DEPRECATED, Deprecation, filled_in
from octavo.plugins.manager import Plugins

SINCE = contract.API_VERSION
GONE = (
    Deprecation("octavo_models", SINCE, "bring a scheme"),
    Deprecation("Backend.memory", SINCE, "say it in probe()"),
    Deprecation("Ops.rotary", SINCE, "use decoder_layer"),
    Deprecation("Capabilities.swap", SINCE, "leave it out"),
    Deprecation("Lane.exclusive", SINCE, "name the kinds"),
)


class OldOps(Ops):
    def rotary(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().rotary(*args, **kwargs)


class Old(Backend):
    name, device_types = "old", ("old",)

    def probe(self) -> Probe:
        return Probe(devices=("old",))

    def memory(self, device: str) -> Any:
        return super().memory(device)

    def capabilities(self, device: str) -> Capabilities:
        return Capabilities(swap=True)

    def ops(self, device: str) -> Ops:
        return OldOps()


class New(Backend):
    name, device_types = "new", ("new",)

    def probe(self) -> Probe:
        return Probe(devices=("new",))


def test_each_use_is_warned_of_and_works(point: Callable[..., metadata.EntryPoint]) -> None:
    points = [
        point("old", Old(), octavo_models=hookimpl(lambda: {"X": "a:b"})),
        point("new", New()),
    ]
    found = Plugins(points, GONE)
    major, minor = SINCE
    tail = f"deprecated since contract {major}.{minor} and may be gone in {major}.{minor + 1}"
    assert found.warnings[0].startswith("plug-in old (")
    assert found.warnings[0].endswith(f"octavo_models is {tail}: bring a scheme")
    assert f"backend 'old': Backend.memory is {tail}: say it in probe()" in found.warnings
    assert len(found.warnings) == 2, "nothing of the backend that uses none of it"
    assert found.models() == {"X": "a:b"} and found.resolve("old").device == "old"
    notes = found.resolved_ops(Old(), "old").notes
    assert [n.split()[2] for n in notes] == ["Ops.rotary", "Capabilities.swap"]
    assert not found.resolved_ops(New(), "new").notes


def test_fields_are_looked_for_inside_a_plan() -> None:
    def plan(*lanes: Lane) -> ExecutionPlan:
        return ExecutionPlan(16, lanes, "float32", "float32")

    found = Plugins([], GONE)
    assert not found.deprecated_in(plan(Lane()))
    (text,) = found.deprecated_in(plan(Lane(exclusive=True), Lane(exclusive=True)))
    assert text.startswith("Lane.exclusive is deprecated") and text.endswith("name the kinds")
    assert filled_in(Capabilities(), GONE) == []


def test_what_is_listed_is_still_there() -> None:
    for each in DEPRECATED:
        owner, _, member = each.name.partition(".")
        found = getattr(contract if member else hookspecs, owner, None)
        assert found is not None and (not member or hasattr(found, member)), each.name
        assert each.since[0] == SINCE[0] and each.since <= SINCE
