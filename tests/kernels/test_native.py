"""The kernels against plain C++ in double precision, without Python: see `native/check.h`."""

from __future__ import annotations

import importlib.resources
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.kernels import cpu

NATIVE = Path(__file__).parent / "native"
HEADERS = Path(__file__).resolve().parents[2] / "kernels/cpu/csrc"
COMPILER = shutil.which("c++") or shutil.which("g++")


@pytest.mark.slow  # the lane of the kernels runs them, too
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_every_variant_of_this_cpu(tmp_path: Path) -> None:
    assert cpu.available(), cpu.why_unavailable()
    assert COMPILER

    def compile(source: Path) -> str:
        out = tmp_path / f"{source.stem}.o"
        command = [COMPILER, "-std=c++17", "-O1", f"-I{HEADERS}", "-c", str(source), "-o", str(out)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return str(out)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile, sorted(NATIVE.glob("*.cpp"))))
    with importlib.resources.as_file(
        importlib.resources.files(cpu.__name__) / "liboctavo_cpu.so"
    ) as library:
        program = tmp_path / "native_tests"
        link = [COMPILER, *objects, str(library), f"-Wl,-rpath,{library.parent}", "-pthread"]
        subprocess.run([*link, "-o", str(program)], check=True, capture_output=True, text=True)
        result = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[:2] for line in lines] == [["passed", isa] for isa in cpu.isas()]
    assert len({line[3] for line in lines}) == 1, "seeded samples differ between variants"
