"""`octavo bench linear`: which products are measured, and how their times are put together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import make

from octavo.core.config import ConfigError
from octavo.core.contract import WeightSpec
from octavo.core.entry.bench.linear import (
    Case,
    Shape,
    WrongResult,
    chosen,
    measure,
    shapes_of,
    whole_model,
)
from octavo.core.entry.cli.main import main
from octavo.core.instruments import LinearPath
from octavo.kernels import cpu


def test_shapes_are_the_models_own() -> None:
    specs = [
        WeightSpec("e", "embedding", (("e", (101, 32)),)),
        *(WeightSpec(f"{i}", "linear", (("a", (40, 32)), ("b", (24, 32)))) for i in range(3)),
        WeightSpec("n", "norm", (("n", (32,)),)),
        WeightSpec("lm_head.weight", "head", (("e", (101, 32)),), alias="e"),
    ]
    assert shapes_of(specs) == [Shape(64, 32, 3, False), Shape(101, 32, 1, True)]


def test_the_whole_model_counts_every_product() -> None:
    """The head never has more than 64 rows; a path that lacks a shape has no total."""
    layer, head = Shape(8, 4, 3, False), Shape(50, 4, 1, True)
    cases = [
        Case(layer, "int8", 64, {"a": 0.1, "b": 0.2}),
        Case(layer, "int8", 512, {"a": 0.5, "b": 0.6}),
        Case(head, "int8", 64, {"a": 1.0, "b": None}),
    ]
    assert whole_model(cases) == {("int8", 64): {"a": 1.3}, ("int8", 512): {"a": 2.5}}
    assert [case.fastest for case in cases] == ["a", "a", "a"]
    assert cases[0].gflops("a") == pytest.approx(2e-9 * 64 * 8 * 4 / 0.1)
    assert cases[2].gflops("b") is None
    assert ("int8", 512) not in whole_model(cases[:1] + cases[2:])


def path(name: str, factor: float, form: str = "float32") -> LinearPath:
    return LinearPath(name, form, 1e-4, lambda weight: lambda x: x @ weight.T * factor)


def refusing(weight: torch.Tensor) -> object:
    raise RuntimeError("no such shape")


def test_wrong_results_are_not_measured() -> None:
    shapes = [Shape(8, 4, 1, False)]
    with pytest.raises(WrongResult, match=r"bad .float32. is off by"):
        measure(shapes, {"float32": [path("good", 1), path("bad", 1.01)]}, [1], 1, print)
    nan = LinearPath("nan", "float32", 1, lambda weight: lambda x: x @ weight.T * float("nan"))
    with pytest.raises(WrongResult):
        measure(shapes, {"float32": [nan]}, [1], 1, print)


def test_a_path_that_refuses_a_shape_is_left_out() -> None:
    never = LinearPath("never", "float32", 1, refusing)  # type: ignore[arg-type]
    heads = [Shape(8, 4, 1, False), Shape(70, 4, 1, True)]
    found = measure(heads, {"float32": [never, path("good", 1)]}, [1, 100], 2, print)
    assert [(case.shape.n, case.rows) for case in found] == [(8, 1), (8, 100), (70, 1)]
    for case in found:
        assert case.seconds["never"] is None and (case.seconds["good"] or 0) > 0
        assert case.fastest == "good"


def test_formats_are_chosen_by_name() -> None:
    paths = [path("a", 1), path("b", 1, "int8"), path("c", 1)]
    assert {k: [p.name for p in v] for k, v in chosen(paths, None).items()} == {
        "float32": ["a", "c"],
        "int8": ["b"],
    }
    assert list(chosen(paths, ["int8"])) == ["int8"]
    with pytest.raises(ConfigError, match=r"int2.*float32, int8"):
        chosen(paths, ["int2"])


def test_every_path_of_the_cpu_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command on a tiny model, by an instruction set that is not the best; results are checked."""
    make("Llama", {"hidden_size": 64, "intermediate_size": 96}).save_pretrained(tmp_path)
    record, before = tmp_path / "l.json", cpu.isa()
    words = f"bench linear {tmp_path} --device cpu --rows 1,5 --passes 1 --isa baseline --markdown"
    main([*words.split(), "--json", str(record)])
    assert cpu.isa() == before
    text = capsys.readouterr().out
    assert "| float32: GFLOP/s | rows | octavo | torch F.linear |" in text
    found = json.loads(record.read_text())
    assert found["isa"] == "baseline"
    by_format: dict[str, set[str]] = {}
    for case in found["cases"]:
        assert case["fastest"] in case["seconds"] and case["gflops"]["octavo"] > 0
        by_format.setdefault(case["format"], set()).add(f"{case['n']}x{case['k']}")
    # 64 hidden, 4 query and 2 KV heads of 16; no product is left out, in no format.
    assert set(by_format) == {"float32", "float16", "bfloat16", "int8", "int4"}
    assert set(map(frozenset, by_format.values())) == {
        frozenset({"128x64", "64x64", "192x64", "64x96", "101x64"})
    }
    assert {"zentorch float32", "ipex float32"} & set(found["not_measured"]) or "zentorch" in text
    assert len(found["whole_model_seconds"]) == 10


def test_an_unknown_instruction_set_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("Llama", {}).save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        main(["bench", "linear", str(tmp_path), "--device", "cpu", "--isa", "mmx"])
    assert "--isa mmx" in capsys.readouterr().err
