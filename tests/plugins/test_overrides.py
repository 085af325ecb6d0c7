"""Single ops that plug-ins replace: who gets them, in which order, and what that does to larger ops."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, ClassVar

import pytest
import torch

from octavo.core.config import ConfigError
from octavo.plugins import Backend, Capabilities, LayerSpec, OpOverride, Ops, Probe, hookimpl
from octavo.plugins.manager import Plugins
from octavo.plugins.overrides import LAYOUT, REPLACEABLE

Point = Callable[..., metadata.EntryPoint]
X = torch.arange(8.0).view(2, 4)


class ChipOps(Ops):
    fusions: ClassVar[Mapping[str, tuple[str, ...]]] = {"decoder_layer": ("rms_norm", "rotary")}

    def supports(self, name: str, spec: LayerSpec) -> bool:
        return True

    def rms_norm(self, x: Any, weight: Any, eps: float, *, offset: float = 0.0) -> torch.Tensor:
        return torch.full_like(x, -1)

    def act_and_mul(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        return torch.zeros(x.shape[0], x.shape[1] // 2)


class Chip(Backend):
    name, device_types = "chip", ("chip",)

    def __init__(self, ops: type[Ops] = ChipOps) -> None:
        self._ops = ops()  # one object for all engines

    def probe(self) -> Probe:
        return Probe(devices=("chip",))

    def ops(self, device: str) -> Ops:
        return self._ops


def giving(value: float) -> Callable[[Ops, str], Callable[..., torch.Tensor]]:
    """An override whose results say who computed them."""

    def make(ops: Ops, device: str) -> Callable[..., torch.Tensor]:
        return lambda x, *_, **__: torch.full_like(x, value)

    return make


def claims(point: Point, **overrides: OpOverride | list[OpOverride]) -> Plugins:
    points = []
    for name, each in overrides.items():
        given = each if isinstance(each, list) else [each]
        points.append(point(name, octavo_ops=hookimpl(lambda given=given: given)))
    return Plugins([*points, point("chips", Chip())])


def norm(priority: int = 0, value: float = 5, **more: Any) -> OpOverride:
    return OpOverride("chip", "rms_norm", giving(value), priority, **more)


def runs(ops: Ops) -> float:
    return float(ops.rms_norm(X, None, 1e-6)[0, 0])


# ------------------------------------------------------------------------------------ who gets it


def test_an_op_is_replaced_and_the_others_stay(point: Point) -> None:
    found = claims(point, fast=norm()).resolved_ops(Chip(), "chip")
    assert runs(found.ops) == 5 and found.ops.act_and_mul(X, "silu").sum() == 0
    assert isinstance(found.ops, ChipOps)
    assert found.told({"rms_norm": "theirs", "linear": "theirs"}) == {
        "rms_norm": "fast (unknown)",
        "linear": "theirs",
        "decoder_layer": "off, rms_norm is replaced",
    }


@pytest.mark.parametrize(
    ("choice", "value"),
    [("auto", 7), ("none", -1), ("low", 5), ("high", 7), ("low,high", 5), (" high , low", 7)],
)
def test_the_order_is_explicit(choice: str, value: float, point: Point) -> None:
    plugins = claims(point, low=norm(1, 5), high=norm(2, 7))
    found = plugins.resolved_ops(Chip(), "chip", choice)
    assert runs(found.ops) == value
    assert bool(found.clashes) == (choice == "auto")


def test_equal_priorities_go_by_name(point: Point) -> None:
    plugins = claims(point, b=norm(value=2), a=norm(value=1))
    found = plugins.resolved_ops(Chip(), "chip")
    assert runs(found.ops) == 1
    (clash,) = found.clashes
    assert clash == plugins.op_clashes()[0]
    assert "'rms_norm' of backend 'chip' is claimed by a (priority 0), b (priority 0)" in clash
    assert "--ops-from b" in clash and "a comes first" in found.notes[0]


def test_one_plugins_own_two_are_no_clash(point: Point) -> None:
    plugins = claims(point, both=[norm(1, 5), norm(2, 7)])
    found = plugins.resolved_ops(Chip(), "chip")
    assert runs(found.ops) == 7 and not found.clashes and not plugins.op_clashes()


def test_an_unknown_name_is_refused(point: Point) -> None:
    plugins = claims(point, fast=norm())
    with pytest.raises(ConfigError, match=r"--ops-from 'fats'.*did you mean 'fast'.*do: fast"):
        plugins.resolved_ops(Chip(), "chip", "fats")
    with pytest.raises(ConfigError, match="none is installed"):
        Plugins([]).resolved_ops(Chip(), "chip", "fast")


def test_other_backends_are_left_alone(point: Point) -> None:
    found = claims(point, fast=norm()).resolved_ops(Chip(), "chip")
    assert found.sources

    class Other(Chip):
        name = "other"

    assert not claims(point, fast=norm()).resolved_ops(Other(), "chip").sources


# ------------------------------------------------------------------------------ who does not want


@pytest.mark.parametrize(
    ("answer", "value", "said"),
    [
        (True, 5, ""),
        (False, -1, "not for chip"),
        ("needs avx512", -1, "needs avx512"),
        (None, -1, "neither a bool nor a reason"),
    ],
)
def test_when(answer: Any, value: float, said: str, point: Point) -> None:
    seen: list[Any] = []

    def when(device: str, capabilities: Capabilities) -> Any:
        seen.append((device, capabilities.dtypes))
        return answer

    found = claims(point, fast=norm(when=when)).resolved_ops(Chip(), "chip")
    assert runs(found.ops) == value and seen == [("chip", ("float32",))]
    assert said in " ".join([*found.notes, *found.problems])


def test_the_next_one_gets_it_when_the_first_does_not_suit(point: Point) -> None:
    plugins = claims(point, a=norm(value=1, when=lambda *_: False), b=norm(value=2))
    found = plugins.resolved_ops(Chip(), "chip")
    assert runs(found.ops) == 2 and not found.clashes


def raises(ops: Ops, device: str) -> Any:
    raise OSError("no such instruction")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("math:no_such_thing", "has no attribute 'no_such_thing'"),
        (raises, "OSError: no such instruction"),
        (lambda ops, device: None, "returned None, which cannot be called"),
        (lambda: None, "TypeError"),
    ],
)
def test_a_broken_override_is_reported_and_the_next_one_runs(
    make: Any, reason: str, point: Point
) -> None:
    bad = OpOverride("chip", "rms_norm", make, 9)
    assert runs(claims(point, bad=bad).resolved_ops(Chip(), "chip").ops) == -1
    found = claims(point, bad=bad, good=norm()).resolved_ops(Chip(), "chip")
    assert runs(found.ops) == 5
    (problem,) = found.problems
    assert problem.startswith("rms_norm of bad (unknown) cannot be used: ") and reason in problem


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (OpOverride("chip", "rms_nrom", raises), "no op 'rms_nrom' (did you mean 'rms_norm'?)"),
        (OpOverride("chip", "pack_weight", raises), "cannot be replaced alone"),
        ("rms_norm", "is no octavo.plugins.OpOverride"),
    ],
)
def test_what_is_no_override_is_reported_at_once(override: Any, reason: str, point: Point) -> None:
    plugins = claims(point, bad=[override, norm()])
    assert reason in plugins.problems[0].reason
    assert len(plugins.claims) == 1, "its other overrides stay"


def test_every_method_is_an_op_or_a_layout() -> None:
    assert {"rms_norm", "paged_attention", "sample", "decoder_layer"} <= REPLACEABLE
    assert not REPLACEABLE & LAYOUT and all(hasattr(Ops, name) for name in LAYOUT)


def test_a_larger_op_that_the_backend_does_not_run_is_not_used(point: Point) -> None:
    layer = OpOverride("chip", "decoder_layer", giving(3))
    assert claims(point, a=layer).resolved_ops(Chip(), "chip").sources
    found = claims(point, a=layer).resolved_ops(Chip(Ops), "chip")
    assert not found.sources and "runs no decoder_layer" in found.notes[0]


# ------------------------------------------------------------------------------------- larger ops


def fuses(found: Any) -> bool:
    spec = LayerSpec(0, 8, 8, 1, 1, 8, *"abcdef")
    return bool(found.ops.fuses("decoder_layer", spec))


def test_a_larger_op_is_off_where_it_would_bypass_an_override(point: Point) -> None:
    assert fuses(claims(point).resolved_ops(Chip(), "chip"))
    found = claims(point, fast=norm()).resolved_ops(Chip(), "chip")
    assert not fuses(found)
    assert "decoder_layer is off: it would do the work of rms_norm" in found.notes[0]
    gate = OpOverride("chip", "act_and_mul", giving(3))
    assert fuses(claims(point, gate=gate).resolved_ops(Chip(), "chip")), "it is not in the layer"


def test_it_stays_on_where_every_override_keeps_it(point: Point) -> None:
    kept = norm(keeps=("decoder_layer",))
    assert fuses(claims(point, fast=kept).resolved_ops(Chip(), "chip"))
    rotary = OpOverride("chip", "rotary", giving(3))
    assert not fuses(claims(point, fast=kept, b=rotary).resolved_ops(Chip(), "chip"))


def test_what_a_backend_promises_of_its_own_draw_is_not_an_overrides_promise(point: Point) -> None:
    class Finite(ChipOps):
        draws_finite: ClassVar[bool] = True

    draw = OpOverride("chip", "sample", giving(3))
    assert not claims(point, draw=draw).resolved_ops(Chip(Finite), "chip").ops.draws_finite
    assert claims(point, fast=norm()).resolved_ops(Chip(Finite), "chip").ops.draws_finite


# ------------------------------------------------------------------------------------- no residue


def test_a_backend_that_hands_out_one_object_collects_no_overrides(point: Point) -> None:
    chip = Chip()
    plugins = claims(point, fast=norm())
    first = plugins.resolved_ops(chip, "chip").ops
    assert type(first).__mro__.count(ChipOps) == 1 and runs(first) == 5
    again = plugins.resolved_ops(chip, "chip").ops
    assert len(type(again).__mro__) == len(ChipOps.__mro__) + 1
    plain = plugins.resolved_ops(chip, "chip", "none").ops
    assert type(plain) is ChipOps and runs(plain) == -1


class NoKernels(Chip):
    def ops(self, device: str) -> Ops:
        raise ImportError("chip was installed without its kernels")


def test_operations_that_cannot_be_loaded_are_one_line(point: Point) -> None:
    with pytest.raises(
        ConfigError, match=r"'chip' has no operations for 'chip': ImportError: chip was"
    ):
        claims(point).resolved_ops(NoKernels(), "chip")


def test_an_override_may_call_what_it_replaces(point: Point) -> None:
    """Through the ops it was given, at any time: they never lead back to it."""

    def make(ops: Ops, device: str) -> Any:
        return lambda x, weight, eps, *, offset=0.0: ops.rms_norm(x, weight, eps) * 2

    found = claims(point, fast=OpOverride("chip", "rms_norm", make)).resolved_ops(Chip(), "chip")
    assert runs(found.ops) == -2


def test_a_name_is_imported_only_when_an_engine_is_made(
    point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("kernel_for_test")
    module.make = giving(4)  # type: ignore[attr-defined]
    plugins = claims(point, fast=OpOverride("chip", "rms_norm", "kernel_for_test:make"))
    monkeypatch.setitem(sys.modules, "kernel_for_test", module)
    assert runs(plugins.resolved_ops(Chip(), "chip").ops) == 4
