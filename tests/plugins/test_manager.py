"""Plug-ins by entry point: which are taken, which are refused and why, and who gets a device word."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from octavo.core.config import ConfigError
from octavo.plugins import Backend, Capabilities, Probe, hookimpl
from octavo.plugins.manager import Plugins, describe, safe_probe


class Toy(Backend):
    def __init__(
        self,
        name: str,
        *words: str,
        priority: int = 0,
        api: Any = (1, 0),
        devices: tuple[str, ...] = ("it",),
        reason: str = "",
    ) -> None:
        self.name, self.device_types, self.priority = name, words or (name,), priority
        self.api_version = api
        self._probe = Probe(devices=devices, reason=reason)

    def probe(self) -> Probe:
        return self._probe


def a_string_for_words() -> Toy:
    made = Toy("toy")
    made.device_types = "toy"  # type: ignore[assignment]  # parentheses without a comma
    return made


def words(plugins: Plugins) -> list[str]:
    return sorted(row.word for row in plugins.devices())


# -------------------------------------------------------------------------------- broken ones


@pytest.fixture
def module_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
        ("x = = 1", "SyntaxError"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("pass", "implements no hook"),
    ],
)
def test_a_broken_module_is_reported_and_hurts_nobody(
    source: str, reason: str, module_path: Path, point: Callable[..., metadata.EntryPoint]
) -> None:
    (module_path / "broken_plugin_under_test.py").write_text(source)
    sys.modules.pop("broken_plugin_under_test", None)
    bad = metadata.EntryPoint("bad", "broken_plugin_under_test", "octavo")
    found = Plugins([bad, point("good", Toy("good"))])
    (problem,) = found.problems
    assert problem.plugin == "bad (broken_plugin_under_test)" and reason in problem.reason
    assert words(found) == ["good"]
    with pytest.raises(ConfigError, match=r"(?s)'bad'.*could not be used: ") as caught:
        found.resolve("bad")
    assert reason in str(caught.value)


def test_a_missing_module_is_reported() -> None:
    found = Plugins([metadata.EntryPoint("gone", "no_such_module_anywhere", "octavo")])
    assert "ModuleNotFoundError" in found.problems[0].reason


def test_a_hook_that_raises_is_reported(point: Callable[..., metadata.EntryPoint]) -> None:
    def fails() -> list[Backend]:
        raise OSError("no device node")

    found = Plugins([point("bad", octavo_backends=hookimpl(fails)), point("good", Toy("good"))])
    assert [p.reason for p in found.problems] == ["OSError: no device node"]
    assert words(found) == ["good"]


@pytest.mark.parametrize("order", [0, 1])
def test_one_bad_backend_leaves_its_siblings(
    order: int, point: Callable[..., metadata.EntryPoint]
) -> None:
    pair = [Toy("old", api=(0, 9)), Toy("new")]
    found = Plugins([point("both", *(pair if order else reversed(pair)))])
    assert words(found) == ["new"] and len(found.problems) == 1


@pytest.mark.parametrize(
    ("hook", "ask"),
    [
        ("octavo_models", Plugins.models),
        ("octavo_quantization_schemes", Plugins.quantization_schemes),
        ("octavo_tool_parsers", Plugins.tool_parsers),
        ("octavo_reasoning_parsers", Plugins.reasoning_parsers),
    ],
)
def test_classes_of_a_broken_plugin_are_left_out(
    hook: str, ask: Callable[[Plugins], Any], point: Callable[..., metadata.EntryPoint]
) -> None:
    def fails() -> dict[str, str]:
        raise KeyError("x")

    good = point("good", **{hook: hookimpl(lambda: {"new": "a.b:C"})})
    found = Plugins([point("bad", **{hook: hookimpl(fails)}), good])
    for _ in range(2):
        assert ask(found) == {"new": "a.b:C"}
    assert [p.reason for p in found.problems] == [f"{hook}: KeyError: 'x'"]


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (object(), "no octavo.plugins.Backend"),
        (Toy(""), "needs a name"),
        (a_string_for_words(), "a tuple of device types, got 'toy' and 'toy'"),
        (Toy("x", api=(2, 0)), r"built for contract 2.0; this engine has 1.3"),
        (Toy("x", api=(0, 4)), "built for contract 0.4"),
        (Toy("x", api="1.0"), "api_version"),
        (Toy("x", api=None), "api_version"),
    ],
)
def test_refused_with_the_reason(
    backend: Any, reason: str, point: Callable[..., metadata.EntryPoint]
) -> None:
    found = Plugins([point("p", backend)])
    assert found.backends == []
    assert reason in found.problems[0].reason


def test_a_newer_minor_version_loads_with_a_warning(
    point: Callable[..., metadata.EntryPoint],
) -> None:
    found = Plugins([point("p", Toy("new", api=(1, 7)))])
    assert words(found) == ["new"]
    assert "newer contract 1.7" in found.warnings[0]


def test_the_major_version_before_loads_with_a_warning(
    point: Callable[..., metadata.EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.plugins.manager.API_VERSION", (3, 0))
    backends = [Toy(f"of{v}", api=(v, 5)) for v in (1, 2, 4)] + [Toy("of3", api=(3, 0))]
    found = Plugins([point("p", *backends)])
    assert words(found) == ["of2", "of3"]
    assert "older contract 2.5" in found.warnings[0] and len(found.warnings) == 1
    assert all("contract 3 or 2" in problem.reason for problem in found.problems)


def test_misspelt_and_unmarked_hooks_are_named(point: Callable[..., metadata.EntryPoint]) -> None:
    found = Plugins(
        [
            point("a", Toy("a"), octavo_model=lambda: {}),
            point("b", octavo_models=hookimpl(lambda: {}), octavo_backends=lambda: [Toy("b")]),
        ]
    )
    assert "octavo_model is no hook (did you mean 'octavo_models'?)" in found.warnings[0]
    assert "octavo_backends is not marked @hookimpl" in found.warnings[1]
    assert words(found) == ["a"]


def test_a_marked_function_that_is_no_hook_is_reported_like_a_broken_plugin(
    point: Callable[..., metadata.EntryPoint],
) -> None:
    wrong = {"octavo_backend": hookimpl(lambda: [Toy("toy")])}
    found = Plugins([point("toy", **wrong), point("both", Toy("b"), **wrong), point("c", Toy("c"))])
    assert words(found) == ["b", "c"] and not found.warnings
    assert [p.plugin.partition(" ")[0] for p in found.problems] == ["both", "toy"]
    told = "octavo_backend is no hook (did you mean 'octavo_backends'?)"
    assert {p.reason for p in found.problems} == {told}
    with pytest.raises(ConfigError) as caught:
        found.resolve("toy")
    assert told in str(caught.value)


def test_a_hook_of_a_newer_release_may_be_marked_optional(
    point: Callable[..., metadata.EntryPoint],
) -> None:
    newer = {"octavo_dreams": hookimpl(lambda: [], optionalhook=True)}
    found = Plugins([point("a", Toy("a"), **newer)])
    assert words(found) == ["a"] and not found.problems and not found.warnings


# ------------------------------------------------------------------------------ two of a kind


def test_the_same_entry_point_twice_counts_once(point: Callable[..., metadata.EntryPoint]) -> None:
    one = point("p", Toy("p"))
    found = Plugins([one, metadata.EntryPoint(one.name, one.value, one.group)])
    assert words(found) == ["p"] and not found.problems and not found.warnings


def test_two_packages_may_use_one_entry_point_name(
    point: Callable[..., metadata.EntryPoint],
) -> None:
    models = {"octavo_models": hookimpl(lambda: {"A": "b:C"})}
    found = Plugins([point("cpu", Toy("one"), **models), point("cpu", Toy("two"))])
    assert words(found) == ["one", "two"] and not found.problems
    assert found.models() == {"A": "b:C"}


@pytest.mark.parametrize(("low", "high"), [(1, 2), (-3, 0)])
def test_priority_decides_who_gets_a_word(
    low: int, high: int, point: Callable[..., metadata.EntryPoint]
) -> None:
    found = Plugins(
        [
            point("a", Toy("weak", "chip", priority=low)),
            point("b", Toy("strong", "chip", priority=high)),
        ]
    )
    assert found.resolve("chip").backend.name == "strong"
    assert found.warnings == [
        f"device word 'chip' is claimed by strong (priority {high}), weak (priority {low}); "
        "the first one gets it"
    ]


# --------------------------------------------------------------------------------- asking


def test_an_unknown_word_names_the_nearest(point: Callable[..., metadata.EntryPoint]) -> None:
    found = Plugins([point("a", Toy("x", "cuda", "rocm")), point("b", Toy("cpu"))])
    with pytest.raises(ConfigError, match=r"--device 'cudaa' \(did you mean 'cuda'\?\)") as caught:
        found.resolve("cudaa")
    assert "device words here: auto, cpu, cuda, rocm" in str(caught.value)


def test_a_word_may_carry_a_torch_device(point: Callable[..., metadata.EntryPoint]) -> None:
    found = Plugins([point("a", Toy("ref")), point("b", Toy("xla", "tpu", "xla:cpu"))])
    resolved = found.resolve("ref:meta")
    assert resolved.device == "ref:meta" and resolved.backend.torch_device("ref:meta") == "meta"
    assert found.resolve("xla:cpu").backend.name == "xla"
    with pytest.raises(ConfigError, match="'xla:gpu'"):
        found.resolve("xla:gpu")


def test_what_a_backend_would_ignore_is_refused(point: Callable[..., metadata.EntryPoint]) -> None:
    class Fixed(Toy):
        def torch_device(self, device: str) -> str:
            return "cpu"

    found = Plugins([point("a", Fixed("fix", devices=("fix:1",)))])
    assert found.resolve("fix").device == "fix"
    assert found.resolve("fix:1").device == "fix:1"
    assert found.resolve("fix:cpu").device == "fix:cpu"
    with pytest.raises(ConfigError, match="takes nothing behind the colon; use fix"):
        found.resolve("fix:2")


def test_a_word_without_a_device_says_why(point: Callable[..., metadata.EntryPoint]) -> None:
    found = Plugins([point("a", Toy("gpu", devices=(), reason="no driver"))])
    with pytest.raises(ConfigError, match="backend 'gpu' has no device: no driver"):
        found.resolve("gpu")


def test_auto_takes_the_best_that_is_there(point: Callable[..., metadata.EntryPoint]) -> None:
    found = Plugins(
        [
            point("a", Toy("cpu", priority=10)),
            point("b", Toy("gpu", priority=50, devices=(), reason="no driver")),
            point("c", Toy("odd", priority=-1)),
        ]
    )
    resolved = found.resolve("auto")
    assert (resolved.backend.name, resolved.device) == ("cpu", "cpu")
    assert "highest priority (10)" in resolved.reason and "not gpu: no driver" in resolved.reason


class Mistaken(Toy):
    def capabilities(self, device: str) -> Capabilities:
        return Capabilities(swaps=True)  # type: ignore[call-arg]  # which is what is wrong with it


def test_capabilities_that_fail_are_a_reason(point: Callable[..., metadata.EntryPoint]) -> None:
    found = Plugins([point("a", Mistaken("bad", priority=9)), point("b", Toy("good", priority=1))])
    with pytest.raises(ConfigError, match=r"'bad' cannot be used, its capabilities .* 'swaps'"):
        found.resolve("bad")
    resolved = found.resolve("auto")
    assert resolved.device == "good" and "'swaps'" in resolved.reason

    class Odd(Toy):
        def capabilities(self, device: str) -> Any:
            return {"swap": True}

    with pytest.raises(ConfigError, match=r"returned \{'swap': True\}, which is no"):
        Plugins([point("a", Odd("odd"))]).resolve("odd")


def test_who_is_installed_is_told_the_reason_and_not_to_install_it(
    point: Callable[..., metadata.EntryPoint],
) -> None:
    broken = [Toy("old", "chip", api=(0, 4))]
    found = Plugins([point("vendor", *broken), point("good", Toy("good"))])
    with pytest.raises(ConfigError) as caught:
        found.resolve("chip")
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("--device 'chip': plug-in vendor (") and "contract 0.4" in first
    assert rest == ["  device words here: auto, good"]
    with pytest.raises(ConfigError) as caught:  # it may be this one, and it may be another
        found.resolve("ship")
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("no backend takes --device 'ship'")
    assert "contract 0.4" in rest[0] and "pip install" in rest[-1]


def test_auto_never_takes_a_negative_priority(point: Callable[..., metadata.EntryPoint]) -> None:
    with pytest.raises(ConfigError, match="no backend found a device"):
        Plugins([point("a", Toy("odd", priority=-1))]).resolve("auto")
    with pytest.raises(ConfigError, match="none is installed"):
        Plugins([]).resolve("auto")


def test_a_probe_that_fails_is_a_reason(point: Callable[..., metadata.EntryPoint]) -> None:
    class Bad(Toy):
        def probe(self) -> Probe:
            raise PermissionError("/dev/chip0")

    class Odd(Toy):
        def probe(self) -> Any:
            return None

    found = Plugins(
        [
            point("a", Bad("bad", priority=9)),
            point("b", Odd("odd", priority=8)),
            point("c", Toy("c")),
        ]
    )
    assert found.resolve("auto").backend.name == "c"
    reasons = {row.word: row.reason for row in found.devices()}
    assert reasons["bad"] == "its probe failed: PermissionError: /dev/chip0"
    assert "it returned None" in reasons["odd"]
    assert not safe_probe(Bad("bad")).devices


def test_rows_are_plain_data_in_order_of_priority(
    point: Callable[..., metadata.EntryPoint],
) -> None:
    found = Plugins(
        [point("a", Toy("low", priority=1)), point("b", Toy("high", "h1", "h2", priority=2))]
    )
    assert [describe(row)["word"] for row in found.devices()] == ["h1", "h2", "low"]
    assert describe(found.devices()[0])["plugin"] == "b"


def test_the_built_in_backends_come_by_the_same_door() -> None:
    found = Plugins()
    mine = {row.word: row for row in found.devices() if row.distribution == "octavo"}
    assert {"cpu", "reference"} <= set(mine)
    assert not [p for p in found.problems if "octavo." in p.plugin], found.problems
    assert found.resolve("auto").backend.name != "reference"
    with pytest.raises(ConfigError, match="behind the colon"):
        found.resolve("cpu:1")


def test_an_absent_device_names_the_extra_that_brings_it(
    module_path: Path, point: Callable[..., metadata.EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    info = module_path / "octavo_third-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: octavo-third\nVersion: 1.0\nProvides-Extra: lame\n"
        "Provides-Extra: bare\nRequires-Dist: driver>=2 ; extra == 'lame'\n"
    )
    dist = metadata.Distribution.at(info)
    absent = [Toy(name, devices=(), reason="no driver") for name in ("lame", "bare")]
    points = [p._for(dist) for p in (point("it", *absent, Toy("here")),)]  # type: ignore[attr-defined]
    rows = {row.word: row for row in Plugins(points).devices()}
    assert rows["lame"].install == "pip install 'octavo-third[lame]'"
    assert rows["lame"].reason == "no driver"
    assert rows["bare"].install == "" == rows["here"].install, "an extra that brings nothing"
    assert describe(rows["lame"])["install"]
