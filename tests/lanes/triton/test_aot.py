"""The ahead-of-time harness: what it must find, and the page it writes. It compiles, which a process that
interprets cannot: so it runs in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HARNESS = ROOT / "ci" / "triton_aot.py"
sys.path.insert(0, str(ROOT / "ci"))

import triton_aot  # noqa: E402 - a script, not a package
from triton_chips import CHIPS, occupancy  # noqa: E402


def harness(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(HARNESS), "--jobs", "1", *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_our_kernels_compile_and_results_are_kept(tmp_path: Path) -> None:
    only = ("--kernels", "rms_norm bf16 n4096 add", "--archs", "sm_90,gfx942")
    first = harness(*only, "--cache", str(tmp_path), "--list")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "7 kernels for 2 chips, 7 of them compiled now" in first.stdout
    again = harness(*only, "--cache", str(tmp_path))
    assert again.returncode == 0 and "7 kernels for 2 chips, 0 of them" in again.stdout


PRELUDE = """
import triton
import triton.language as tl
from octavo.kernels.triton.tiles import Tile
from octavo.kernels.triton.variants import Variant
"""
PRODUCT = """
@triton.jit
def product_kernel(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))

def variant(name, n, kind="*bf16", warps=4, **more):
    types = {"x": kind, "y": kind, "out": "*fp32"}
    return Variant(name, product_kernel, types, {"N": n}, tile=lambda arch: Tile(1, 1, 1, warps), **more)
"""


def bad(tmp_path: Path, body: str, archs: str = "sm_80") -> str:
    """What the harness says of a package with this module; it must not be content."""
    package = tmp_path / "bad_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernels.py").write_text(PRELUDE + body)
    done = harness(
        *("--package", "bad_kernels", "--archs", archs, "--cache", str(tmp_path / "cache")),
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_spills_are_found_with_their_tile(tmp_path: Path) -> None:
    body = PRODUCT + 'AOT = [variant("big", 128, warps=1, tensor_cores=True)]'
    said = bad(tmp_path, body, "sm_80,gfx1100")
    assert "big sm_80: spills" in said and "big gfx1100: spills" in said
    assert "stages 1, warps 1" in said


def test_too_much_shared_memory_is_found(tmp_path: Path) -> None:
    body = PRODUCT + 'AOT = [variant("wide", 256, warps=16, tensor_cores=True)]'
    said = bad(tmp_path, body, "sm_86")
    assert "wide sm_86:" in said and "shared memory" in said


def test_products_without_matrix_instructions_are_found(tmp_path: Path) -> None:
    body = """
@triton.jit
def sum_kernel(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)), 0))

AOT = [Variant("sum", sum_kernel, {"x": "*fp32", "out": "*fp32"}, {"N": 64},
               tile=lambda arch: Tile(1, 1, 1, 1), tensor_cores=True)]
"""
    assert "sum sm_80: no matrix instruction" in bad(tmp_path, body)


def test_a_product_that_does_not_say_so_is_found(tmp_path: Path) -> None:
    said = bad(tmp_path, PRODUCT + 'AOT = [variant("silent", 32)]', "sm_90,gfx942")
    assert "silent sm_90: multiplies matrices and does not say so" in said
    assert "silent gfx942: multiplies matrices and does not say so" in said


def test_a_kernel_without_a_variant_is_found(tmp_path: Path) -> None:
    body = (
        PRODUCT
        + 'AOT = [variant("fine", 32, tensor_cores=True)]'
        + """

@triton.jit
def helper(x):
    return x + 1

@triton.jit
def lost_kernel(x):
    tl.store(x, helper(tl.load(x)))
"""
    )
    said = bad(tmp_path, body)
    assert "kernels.lost_kernel: no variant of it is compiled" in said
    assert "helper" not in said and "fine" not in said


def test_wrong_arguments_and_errors_of_the_compiler_are_found(tmp_path: Path) -> None:
    body = """
@triton.jit
def odd_kernel(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1.0)

def variant(name, signature, constexprs):
    return Variant(name, odd_kernel, signature, constexprs, tile=lambda arch: Tile(1, 1, 1, 1))

AOT = [variant("odd", {"x": "*fp32"}, {"N": 3}), variant("less", {"x": "*fp32"}, {})]
"""
    said = bad(tmp_path, body)
    assert "odd sm_80: does not compile" in said and "power of 2" in said
    assert "less sm_80: does not compile: ValueError" in said


def test_an_empty_selection_is_not_success(tmp_path: Path) -> None:
    done = harness("--kernels", "no such kernel", "--cache", str(tmp_path))
    assert done.returncode == 1 and "nothing to compile" in done.stdout
    done = harness("--archs", "sm_1", "--cache", str(tmp_path))
    assert done.returncode == 1 and "sm_90" in done.stdout
    done = harness("--cache", str(tmp_path), TRITON_INTERPRET="1")
    assert done.returncode == 1 and "never compiled" in done.stdout


def test_a_quick_run_leaves_no_variant_and_no_pair_of_kernel_and_chip_out() -> None:
    found = triton_aot.modules(triton_aot.PACKAGE)
    everything = triton_aot.product(found, CHIPS)
    some = triton_aot.quick(found, list(CHIPS))
    assert len(set(some)) == len(some) < len(everything) and set(some) <= set(everything)
    assert {task[:2] for task in some} == {task[:2] for task in everything}
    kernel = {(m, v.name): v.fn for m, values in found.items() for v in triton_aot.variants(values)}
    pairs = [{(kernel[t[:2]], t[2]) for t in tasks} for tasks in (some, everything)]
    assert pairs[0] == pairs[1]


def test_the_page_has_every_variant_of_today() -> None:
    found = triton_aot.modules(triton_aot.PACKAGE)
    today = triton_aot.product(found, CHIPS)
    data = json.loads(triton_aot.DATA.read_text("utf-8"))
    shown = {(row["module"], row["variant"], row["arch"]) for row in data["rows"]}
    assert {task[:2] for task in shown} == {task[:2] for task in today}, "run --write"
    assert shown <= set(today) and {task[2] for task in shown} == set(CHIPS)


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps", "share"),
    [
        ("sm_80", 32, 0, 4, 1.0),
        ("sm_80", 128, 0, 8, 0.25),
        ("sm_80", 255, 0, 4, 0.125),
        ("sm_80", 32, 100 * 1024, 4, 0.0625),  # one program for its shared memory
        ("sm_86", 40, 0, 4, 1.0),
        ("sm_90", 168, 0, 12, 0.1875),
        ("gfx942", 128, 0, 4, 0.5),
        ("gfx942", 512, 0, 4, 0.125),
        ("gfx90a", 64, 33 * 1024, 4, 0.125),
        ("gfx1100", 96, 0, 4, 1.0),
        ("gfx1201", 256, 0, 4, 0.3125),
    ],
)
def test_occupancy(arch: str, registers: int, shared: int, warps: int, share: float) -> None:
    assert occupancy(CHIPS[arch], registers, shared, warps) == share
