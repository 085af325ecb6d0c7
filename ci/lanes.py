"""The lanes: what is run to prove each backend, where, with what, and how long it takes.

This table is the only place that says so. `noxfile.py` makes a session of each row, `ci/lane` runs them,
and `ci/make_workflow.py` writes the GitHub workflow and the table in docs/lanes.md from it.

A lane that has nothing to show fails: no test collected, a test skipped, a scorecard without passed
operations, or a script whose output does not count what it did (`Step.proof`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
EVERY_RUN_LIMIT = 40  # minutes that the lanes of every run may take together

Proof = Literal["executed", "interpreted", "compiled", "schema-checked"]


def _pinned_torch() -> str:
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    if found is None:
        raise ValueError("constraints.txt pins no torch")
    return found.group(1)


TORCH = _pinned_torch()


@dataclass(frozen=True)
class Step:
    """One command of a lane, run in the repository's root.

    command: words; the first is a program of the lane's environment. `{out}` is the lane's folder of
    results. pytest gets a JUnit file by itself, `octavo backend check` a scorecard.
    proof: for a script, a pattern whose first group is a number of things done, found once or more in
    its output, and above 0 in all.
    """

    command: str
    proof: str = ""


@dataclass(frozen=True)
class Lane:
    """proves: what was truly done, in one word; what: in a sentence.

    requirements: NAME of ci/requirements/NAME.txt. packages: folders of this repository to install.
    torch: its version; another than the project's means an environment of the lane's own, and "" that
    the machine has one from the chip's maker. system: Debian packages the machine must have.
    minutes: what it is given on two idle cores, with its environment made. runner: GitHub's labels of a machine that
    can run it. skips: tests may be skipped here.
    """

    name: str
    backend: str
    proves: Proof
    what: str
    steps: tuple[Step, ...]
    minutes: float
    every: bool = True
    requirements: str = ""
    packages: tuple[str, ...] = ()
    torch: str = TORCH
    system: tuple[str, ...] = ()
    runner: tuple[str, ...] = ("ubuntu-latest",)
    skips: bool = False

    @property
    def environment(self) -> Literal["project", "layer", "own", "machine"]:
        """project: .venv. layer: on top of it, with what the lane adds. own: apart from it. machine: on
        top of the Python that has the chip maker's torch."""
        if not self.torch:
            return "machine"
        if self.torch != TORCH:
            return "own"
        return "layer" if self.requirements or self.packages else "project"

    @property
    def on_chip(self) -> bool:
        """Whether it needs the chip itself."""
        return "self-hosted" in self.runner

    @cached_property
    def requirements_file(self) -> Path | None:
        """Where its requirements are."""
        name = self.requirements
        return ROOT / "ci/requirements" / f"{name}.txt" if name else None


CROSS = ("g++-aarch64-linux-gnu", "g++-powerpc64le-linux-gnu", "qemu-user-static")


def _chip(word: str, backend: str, labels: tuple[str, ...], requirements: str, torch: str) -> Lane:
    """The whole kit, and a benchmark, on a machine with the chip."""
    return Lane(
        name=word,
        backend=backend,
        proves="executed",
        what=f"The whole conformance kit and `octavo bench` on a machine with the chip (`--device {word}`)",
        steps=(
            Step(f"octavo backend check {backend} --device {word} --full"),
            Step(
                f"octavo bench latency --device {word} --json {{out}}/latency.json",
                r"(?m)^ *\d+ +(\d+) +TPOT",  # output tokens
            ),
        ),
        minutes=30,
        every=False,
        requirements=requirements,
        torch=torch,
        runner=("self-hosted", "linux", *labels),
    )


LANES: tuple[Lane, ...] = (
    Lane(
        "cpu-kernels",
        "cpu",
        "executed",
        "The C++ kernels and their native tests here, under sanitizers, and under qemu as ARM and POWER CPUs; "
        "the machine code of every variant is read",
        (
            Step(
                "python ci/cross_cpu.py --work {cache}/cross_cpu",
                r"(?m)^(?:x86_64|aarch64|ppc64le) .*?\s(\d+)\s",
            ),
        ),
        minutes=7,
        system=CROSS,
    ),
    Lane(
        "conformance-cpu",
        "cpu, reference",
        "executed",
        "The conformance kit over the CPU backend and over the reference backend",
        (Step("pytest tests/lanes/conformance"),),
        minutes=2,
    ),
    Lane(
        "strict",
        "strict",
        "executed",
        "The kit and the core's own engine tests on the awkward example chip, installed as a third party's package",
        (Step("pytest tests/lanes/strict --scorecards {out}"),),
        minutes=2,
        packages=("plugins/examples/octavo-strict",),
    ),
    Lane(
        "triton",
        "triton",
        "interpreted",
        "Every Triton kernel, the engine and the whole kit in Triton's interpreter, and a part of kernels x chips "
        "compiled ahead of time: registers, spills, shared memory, tensor-core instructions",
        (
            Step("pytest tests/lanes/triton --scorecards {out}"),
            Step("python ci/triton_aot.py --quick", r"(\d+) kernels for \d+ chips"),
        ),
        minutes=6,
        requirements="triton",
    ),
    Lane(
        "triton-all",
        "triton",
        "compiled",
        "Every Triton kernel for every chip, ahead of time; results are kept by the hash of their source",
        (Step("python ci/triton_aot.py", r"(\d+) kernels for \d+ chips"),),
        minutes=10,
        every=False,
        requirements="triton",
    ),
    Lane(
        "pallas",
        "xla",
        "interpreted",
        "The Pallas kernels in interpret mode, and compiled for TPU v4, v5e, v5p and v6e by libtpu; so is the draw",
        (Step("pytest tests/lanes/pallas"),),
        minutes=3,
        requirements="pallas",
    ),
    Lane(
        "xla",
        "xla",
        "executed",
        "The XLA backend on PJRT's CPU, kit included, and over two and four such devices; its StableHLO, that of four "
        "chips and the draw's included, compiled for TPU v4, v5e, v5p and v6e (an environment of 7 GB)",
        (
            Step("pytest tests/lanes/xla"),
            Step("octavo backend check xla --device xla:cpu"),
            Step("python ci/xla_aot.py", r"(?m) (?:v4|v5e|v5p|v6e) .* (\d+) *$"),  # kernels
        ),
        minutes=20,
        every=False,
        requirements="xla",
        torch="2.9.1",
    ),
    Lane(
        "gaudi",
        "gaudi",
        "schema-checked",
        "The Gaudi backend on a stand-in `hpu` device, through the vendor's documented operations, kit included",
        (Step("pytest tests/lanes/gaudi --scorecards {out}"),),
        minutes=3,
        requirements="gaudi",
    ),
    Lane(
        "ascend",
        "ascend",
        "schema-checked",
        "The Ascend backend through torch-npu's own schemas, with CPU bodies behind them and no CANN, kit included",
        (Step("pytest tests/lanes/ascend --scorecards {out}"),),
        minutes=2,
        requirements="ascend",
    ),
    Lane(
        "cpu-arm-engine",
        "cpu",
        "executed",
        "The whole engine with tiny models as an ARM CPU under qemu, PyPI's torch: tokens equal the reference's",
        (Step("python ci/qemu_engine.py aarch64 --work {cache}", r"(\d+) token lists"),),
        minutes=4,
        every=False,
        system=CROSS,
    ),
    Lane(
        "cpu-power-engine",
        "cpu",
        "executed",
        "The whole engine with tiny models as a POWER10 CPU under qemu, Debian's torch: tokens equal the reference's",
        (Step("python ci/qemu_engine.py ppc64le --work {cache}", r"(\d+) token lists"),),
        minutes=4,
        every=False,
        system=CROSS,
        runner=("self-hosted", "linux", "debian"),
    ),
    Lane(
        "slow",
        "cpu, reference",
        "executed",
        "The long tests of the normal environment",
        (Step("pytest -m slow --timeout 3600"),),
        minutes=30,
        every=False,
        skips=True,
    ),
    _chip("cuda", "triton", ("gpu", "cuda"), "triton", TORCH),
    _chip("rocm", "triton", ("gpu", "rocm"), "", ""),
    _chip("tpu", "xla", ("tpu",), "tpu", "2.9.1"),
    _chip("hpu", "gaudi", ("hpu",), "", ""),
    _chip("npu", "ascend", ("npu",), "", ""),
)

BY_NAME = {lane.name: lane for lane in LANES}


def every_run() -> tuple[Lane, ...]:
    """The lanes of every run."""
    return tuple(lane for lane in LANES if lane.every)


def table() -> str:
    """The lanes as a Markdown table."""
    lines = [
        "| lane | backend | proof | what is done | environment | when | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for lane in LANES:
        kinds = {
            "project": f"the project's, torch {TORCH}",
            "layer": f"the project's, torch {TORCH}, and more",
            "own": f"its own, torch {lane.torch}",
            "machine": "the machine's torch, from the chip's maker",
        }
        parts = [kinds[lane.environment]]
        parts += [f"`ci/requirements/{lane.requirements}.txt`"] if lane.requirements else []
        parts += [f"`{package}`" for package in lane.packages]
        parts += ["Debian's " + ", ".join(lane.system)] if lane.system else []
        when = "every run" if lane.every else "on demand"
        if "self-hosted" in lane.runner:
            when += ", on a runner labelled " + ", ".join(f"`{label}`" for label in lane.runner[2:])
        row = (f"`{lane.name}`", lane.backend, lane.proves, lane.what, "; ".join(parts), when)
        lines.append(f"| {' | '.join(row)} | {lane.minutes:g} |")
    total = sum(lane.minutes for lane in every_run())
    lines += ["", f"Every run: {total:g} minutes in all, of the {EVERY_RUN_LIMIT} allowed."]
    return "\n".join(lines)
