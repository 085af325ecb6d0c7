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
            best = "avx2_vnni" if "avx_vnni" in words else "avx2"
            if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= words:
                best = "avx512_vnni" if "avx512_vnni" in words else "avx512"
    elif platform.machine() == "aarch64" and "asimddp" in flags:
        best = "i8mm" if "i8mm" in flags else "dotprod"
    elif platform.machine() == "ppc64le":
        generations = {"POWER9": "power9", "POWER10": "power10", "POWER11": "power10"}
        best = next((generations[name] for name in generations if name in flags), best)
    assert cpu.isa() == best == cpu.isas()[0]
    assert cpu.isas()[-1] == "baseline"


def test_forcing_a_variant() -> None:
    with pytest.raises(ValueError, match="not among"):
        cpu.force_isa("mmx")
    for name in reversed(cpu.isas()):
        cpu.force_isa(name)
        assert cpu.isa() == name


def test_the_number_of_threads() -> None:
    assert cpu.set_threads(1) == cpu.threading() == "serial"
    assert cpu.threads() == 1
    assert cpu.set_threads(3) == cpu.threading() == "3 threads"
    assert cpu.threads() == 3
    with pytest.raises(ValueError, match="at least 1"):
        cpu.set_threads(0)
    cpu.set_threads()
    assert cpu.threads() == torch.get_num_threads()


SCRIPT = """
import os, sys, threading, time
from octavo.kernels import cpu
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert cpu.threads() == 1 and cpu.threading().startswith("serial")
import torch
torch.set_num_threads(2); torch.relu(torch.randn(1 << 20))  # starts its threads
tasks = lambda: len(os.listdir("/proc/self/task"))
def soon(count):  # a thread that was joined stays in the list until the kernel has buried it
    until = time.monotonic() + 10
    while tasks() != count and time.monotonic() < until:
        time.sleep(0.01)
    return tasks() == count
before = tasks()
cpu.set_threads(4)
assert soon(before + 3)
cpu.set_threads(2)
assert soon(before + 1), "the old pool's threads are still there"

def engine(results, i):
    g = torch.Generator().manual_seed(i)
    x, w = torch.randn(256, 2048, generator=g), torch.ones(2048)
    want = torch.nn.functional.rms_norm(x, (2048,), None, 1e-5)
    for _ in range(50):
        out = torch.empty_like(x)
        cpu.rms_norm(out, x, w, 1e-5)
        results.append(torch.allclose(out, want, rtol=1e-5, atol=1e-6))
results = []
both = [threading.Thread(target=engine, args=(results, i)) for i in range(3)]
[t.start() for t in both]; [t.join() for t in both]
assert all(results) and len(results) == 150

for spins in (0, 1, 100000):  # sleeping at once, and hardly ever
    cpu.set_threads(4, spins=spins)
    results.clear()
    engine(results, 7)
    assert all(results)
assert cpu.set_threads(1) == "serial"
assert soon(before), tasks() - before
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
def test_one_pool_and_several_callers() -> None:
    """In a fresh process: nothing heavy is imported, threads come and go, callers do not disturb
    one another."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_a_stopped_worker_does_not_stop_the_caller() -> None:
    """More threads than cores, and workers that are late: the caller does their share."""
    x, w = torch.randn(512, 512), torch.ones(512)
    want = torch.nn.functional.rms_norm(x, (512,), None, 1e-5)
    for count in (2, 5, 16):
        cpu.set_threads(count)
        for _ in range(20):
            out = torch.empty_like(x)
            cpu.rms_norm(out, x, w, 1e-5)
            torch.testing.assert_close(out, want)
    cpu.set_threads()


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


def test_phases_are_counted_only_on_request(isa: str) -> None:
    from octavo.kernels.cpu import measure

    x, w = torch.randn(64, 256), torch.ones(256)
    packed = {
        form: cpu.PackedWeight(512, 256, form).pack([torch.randn(512, 256)])
        for form in ("float32", "int4")
    }

    def work(form: str) -> None:
        cpu.rms_norm(torch.empty_like(x), x, w, 1e-5)
        cpu.linear(torch.empty(64, 512), x, packed[form])

    measure.stop_phases()
    work("float32")
    assert set(measure.read_phases().values()) == {0.0}
    measure.start_phases()
    work("float32")
    found = measure.read_phases()
    assert found["norm"] > 0 and found["linear"] > 0 and found["quantise"] == 0
    assert tuple(found) == measure.PHASES and found["attention"] == found["sampling"] == 0
    work("int4")
    later = measure.read_phases()
    assert later["quantise"] > 0 and later["linear"] > found["linear"]
    measure.start_phases()
    assert set(measure.read_phases().values()) == {0.0}
    measure.stop_phases()


def test_peaks_do_what_they_count(isa: str) -> None:
    """Work in proportion to the rounds, and reads that read everything."""
    from octavo.kernels.cpu import measure
    from octavo.kernels.cpu.library import lib

    lanes = {"baseline": 4, "avx2": 8}.get(isa, 16) if platform.machine() != "ppc64le" else 4
    assert lib.peak(0, 100) == cpu.threads() * 16 * 100 * 12 * 2 * lanes
    assert lib.peak(1, 100) in (2 * lib.peak(0, 100), 4 * lib.peak(0, 100))
    assert lib.peak(7, 100) < 0
    for kind, bytes_a_lane in (("float32", 1), ("int8", 4)):
        # Two units of this width at 10 GHz: a compiler that leaves the work out goes far beyond.
        bound = cpu.threads() * 1e10 * 2 * 2 * lanes * bytes_a_lane
        assert 0 < measure.peak(kind, 0.01) < bound
    for size in (64, 256, 1 << 20, (3 << 20) + 448):
        words = torch.randint(1 << 31, (size // 4,), dtype=torch.int32)
        want = 0
        for word in words.numpy():
            want ^= int(word)
        assert lib.read(words.data_ptr(), size) == want
    assert measure.read_bandwidth(words, 0.01) > 1e6
    with pytest.raises(ValueError, match="multiple of 64"):
        measure.read_bandwidth(words[:17])


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages"
)
def test_huge_pages_are_asked_for() -> None:
    small = torch.empty(100)
    assert cpu.huge_pages(small) is small
    large = cpu.huge_pages(torch.empty(32 << 20, dtype=torch.uint8))
    middle, flags = large.data_ptr() + (16 << 20), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            begin, end = (int(at, 16) for at in words[0].split("-"))
            inside = begin <= middle < end
        elif words[0] == "VmFlags:" and inside:
            flags = line
    assert " hg" in flags
    large.fill_(3)
    assert bool((large == 3).all())
