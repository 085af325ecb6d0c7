"""The library itself: what was built, which variant runs, whose threads it uses."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels import cpu


def test_the_kernels_were_built() -> None:
    """A failed compile falls back to an install without kernels; that must not pass unseen."""
    assert cpu.available(), cpu.why_unavailable()
    assert cpu.why_unavailable() is None


def test_the_best_variant_runs() -> None:
    flags = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    best = "baseline"
    if platform.machine() in ("x86_64", "AMD64"):
        words = set(flags.split())
        if {"avx2", "fma", "f16c"} <= words:
            best = "avx2"
            if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= words:
                best = "avx512"
    elif platform.machine() == "ppc64le" and "POWER10" in flags:
        best = "power10"
    assert cpu.isa() == best == cpu.isas()[0]
    assert cpu.isas()[-1] == "baseline"


def test_forcing_a_variant() -> None:
    with pytest.raises(ValueError, match="not among"):
        cpu.force_isa("mmx")
    for name in reversed(cpu.isas()):
        cpu.force_isa(name)
        assert cpu.isa() == name


def test_threads_are_torchs() -> None:
    assert cpu.set_threads(1) == cpu.threading() == "serial: one thread asked for"
    assert cpu.threads() == 1
    words = cpu.set_threads(2)
    if cpu.openmp_runtimes():
        assert words == cpu.threading() and words.endswith(", 2 threads")
        assert cpu.threads() == 2
    else:
        assert words.startswith("serial:") and cpu.threads() == 1
    with pytest.raises(ValueError, match="at least 1"):
        cpu.set_threads(0)
    cpu.set_threads()


SCRIPT = """
import sys, threading
from octavo.kernels import cpu
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert cpu.threads() == 1 and cpu.threading().startswith("serial")
assert cpu.set_threads(2).startswith("serial"), "no runtime is there to borrow yet"
import torch
x = torch.randn(300, 300); x @ x; torch.relu(torch.randn(1 << 20))
before = cpu.openmp_runtimes()
tasks = set(__import__("os").listdir("/proc/self/task"))
print(cpu.set_threads(2))
w, out = torch.ones(4096), torch.empty(512, 4096)
for _ in range(3):
    cpu.rms_norm(out, torch.randn(512, 4096), w, 1e-5)
assert cpu.openmp_runtimes() == before and len(before) == 1, (before, cpu.openmp_runtimes())
after = set(__import__("os").listdir("/proc/self/task"))
assert len(after - tasks) <= (1 if len(tasks) < 2 else 0), "threads beside torch's own"

def engine(results, i):
    g = torch.Generator().manual_seed(i)
    x = torch.randn(256, 2048, generator=g)
    want = torch.nn.functional.rms_norm(x, (2048,), None, 1e-5)
    for _ in range(20):
        out = torch.empty_like(x)
        cpu.rms_norm(out, x, w[:2048], 1e-5)
        results.append(torch.allclose(out, want, rtol=1e-5, atol=1e-6))
results = []
both = [threading.Thread(target=engine, args=(results, i)) for i in range(2)]
[t.start() for t in both]; [t.join() for t in both]
assert all(results) and len(results) == 40
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_no_second_runtime_and_two_engines() -> None:
    """In a fresh process: nothing heavy is imported, one OpenMP runtime, one pool."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "2 threads" in result.stdout


def fake_root(tmp_path: Path, cgroup: str, files: dict[str, str]) -> str:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


def test_core_count(tmp_path: Path) -> None:
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= cpu.core_count() <= (have or 1)
    v2 = fake_root(tmp_path / "v2", "0::/a/b\n", {"a/b/cpu.max": "max 100000"})
    assert cpu.core_count(v2) == have
    (tmp_path / "v2/sys/fs/cgroup/a/cpu.max").write_text("150000 100000")
    assert cpu.core_count(v2) == 1
    mounted = fake_root(tmp_path / "root", "0::/not/here\n", {"cpu.max": "100000 100000"})
    assert cpu.core_count(mounted) == 1
    v1 = fake_root(
        tmp_path / "v1",
        "4:memory:/x\n3:cpu,cpuacct:/x\n",
        {"cpu,cpuacct/x/cpu.cfs_quota_us": "50000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
    )
    assert cpu.core_count(v1) == 1
    assert cpu.core_count(str(tmp_path / "nothing")) == have


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(TypeError, match="float64"):
        cpu.dtype_code(torch.float64)
    x = torch.ones(2, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match="float64"):
        cpu.rms_norm(x, x, x[0], 1e-5)
