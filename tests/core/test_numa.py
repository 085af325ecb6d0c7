"""Processors and memory nodes: what is asked for, what is there, and that the engine runs there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.numa import Binding, binding, node_free, nodes, parse_cpus

MEMINFO = """\
Node 1 MemTotal:        1000 kB
Node 1 MemFree:          100 kB
Node 1 Active(file):      20 kB
Node 1 Inactive(file):     3 kB
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two nodes with processors and one with memory alone."""
    for name, cpus in {"node0": "0-3,8-11", "node1": "4-7,12-15", "node2": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus + "\n")
    (tmp_path / "node1" / "meminfo").write_text(MEMINFO)
    (tmp_path / "power").mkdir()
    return tmp_path


@pytest.fixture
def one_node(tmp_path: Path) -> Path:
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-3\n")
    return tmp_path


ALL = frozenset(range(16))


def test_nodes_are_read(machine: Path) -> None:
    assert nodes(machine) == {
        0: frozenset({0, 1, 2, 3, 8, 9, 10, 11}),
        1: frozenset({4, 5, 6, 7, 12, 13, 14, 15}),
    }
    assert nodes(machine / "nowhere") == {}
    assert node_free(1, machine) == 123 << 10
    assert node_free(0, machine) is None


def test_this_machine_has_nodes_with_this_process_on_them() -> None:
    known = nodes()
    if known:  # a container may hide them
        assert set().union(*known.values()) >= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("", set()), ("1,1-2", {1, 2})]
)
def test_lists_of_processors(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


def test_a_node_is_its_processors(machine: Path) -> None:
    second = frozenset({4, 5, 6, 7, 12, 13, 14, 15})
    assert binding(None, 1, ALL, machine) == Binding(second, 1)
    assert binding("node:1", None, ALL, machine) == Binding(second, 1)
    assert binding("node:1", None, frozenset({0, 5}), machine) == Binding(frozenset({5}), 1)


def test_a_list_knows_the_node_it_lies_on(machine: Path) -> None:
    assert binding("0-1", None, ALL, machine) == Binding(frozenset({0, 1}), 0)
    assert binding("3,4", None, ALL, machine) == Binding(frozenset({3, 4}), None)


def test_nothing_asked_binds_nothing(machine: Path) -> None:
    assert binding(None, None, ALL, machine) is None
    assert binding("none", None, ALL, machine) is None


def test_one_node_is_told(one_node: Path) -> None:
    found = binding(None, 0, frozenset({0, 1}), one_node)
    assert found is not None and found.cpus == {0, 1} and found.node is None
    assert found.note == "--numa-node 0: this machine has one memory node, nothing changes"


@pytest.mark.parametrize(
    ("affinity", "node", "told"),
    [
        (None, 2, r"--numa-node 2: .* has 0 \(processors 0-3,8-11\), 1 \(processors 4-7,12-15\)"),
        ("node:7", None, "--cpu-affinity node:7: there is no such node"),
        ("node:x", None, "write processors as 0-3,8, or node:N, or none"),
        ("fast", None, "write processors as 0-3,8, or node:N, or none"),
        ("", None, "write processors as"),
        ("3-1", None, "write processors as"),
        ("14-17", None, "may not use 16-17; it may use 0-15"),
        ("0", 0, "give one of them"),
    ],
)
def test_mistakes(machine: Path, affinity: str | None, node: int | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        binding(affinity, node, ALL, machine)


def test_a_node_without_a_processor_for_us(machine: Path) -> None:
    with pytest.raises(ConfigError, match=r"none of its processors 4-7,12-15; it may use 0-1"):
        binding(None, 1, frozenset({0, 1}), machine)


def test_a_system_that_tells_no_nodes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not tell"):
        binding(None, 0, ALL, tmp_path)


@pytest.mark.parametrize("value", [-1, 1.5, "0", True])
def test_a_node_is_a_number(value: object) -> None:
    with pytest.raises(ConfigError, match="numa_node"):
        EngineConfig.from_kwargs(numa_node=value)


ENGINE = """
import os, sys
from pathlib import Path
from tests.fakes.tiny_models import engine, greedy, prompt_of, run
folder, cpu = Path(sys.argv[1]), int(sys.argv[2])
made = engine(folder, device="cpu", cpu_affinity=str(cpu), packed_cache=False)
run(made, greedy("a", prompt_of(20), 2))
from octavo.kernels import cpu as lib
assert os.sched_getaffinity(0) == {cpu}
assert lib.threads() == 1, lib.threads()
made = engine(folder, device="cpu", cpu_affinity=str(cpu), packed_cache=False, threads=3)
tids = [int(name) for name in os.listdir("/proc/self/task")]
pool = max(tids)  # the newest threads are the kernels' own
assert lib.threads() == 3 and os.sched_getaffinity(pool) == {cpu}
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not on this system")
def test_the_engine_and_its_threads_run_there(tmp_path: Path) -> None:
    make("Llama", {}).save_pretrained(tmp_path)
    cpu = max(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(tmp_path), str(cpu)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
