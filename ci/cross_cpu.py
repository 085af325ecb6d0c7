#!/usr/bin/env python3
"""The CPU kernels on instruction sets that this machine lacks.

Builds the kernels and their native tests for this machine, for ARM and for POWER; runs them here, under
the address, undefined-behaviour and thread sanitizers, and under qemu as several CPUs; and reads the
machine code of every variant (see disassembly.py). Prints a table and exits with 1 if anything is not
as it should be.

Cross compilers and qemu are used if they are installed. If not, their Debian or Ubuntu packages are
downloaded and unpacked in the work folder; nothing is installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from disassembly import check_build

ROOT = Path(__file__).resolve().parents[1]
HERE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


@dataclass(frozen=True)
class Target:
    """A machine to build for; cpus: qemu's model of a CPU, and the variant to be chosen on it."""

    machine: str
    triplet: str
    cpus: dict[str, str]


TARGETS = (
    Target(
        "aarch64",
        "aarch64-linux-gnu",
        {"cortex-a57": "baseline", "cortex-a76": "dotprod", "max": "i8mm"},
    ),
    Target(
        "ppc64le",
        "powerpc64le-linux-gnu",
        {"power8": "baseline", "power9": "power9", "power10": "power10"},
    ),
)


@dataclass
class Row:
    machine: str
    cpu: str
    variant: str
    checks: str
    tokens: str


class Tools:
    """Where the cross compilers, their libraries and qemu are."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.unpacked = work / "root"
        self.env = dict(os.environ)

    def find(self, program: str) -> str | None:
        unpacked = self.unpacked / "usr/bin" / program
        return shutil.which(program) or (str(unpacked) if unpacked.exists() else None)

    def qemu(self, machine: str) -> str | None:
        return self.find(f"qemu-{machine}-static") or self.find(f"qemu-{machine}")

    def sysroot(self, compiler: str) -> Path:
        return self.unpacked if Path(compiler).is_relative_to(self.unpacked) else Path("/")

    def need(self, targets: list[Target]) -> None:
        """Get what is missing for the targets; SystemExit says what to install if that fails."""
        packages = [f"g++-{t.triplet}" for t in targets if not self.find(f"{t.triplet}-g++")]
        if not all(self.qemu(t.machine) for t in targets):
            packages.append("qemu-user-static")
        if packages:
            print("unpacking", *packages, flush=True)
            self.download(packages)
        missing = [t.machine for t in targets if not self.find(f"{t.triplet}-g++")]
        missing += [f"qemu-{t.machine}" for t in targets if not self.qemu(t.machine)]
        if missing:
            sys.exit(f"nothing to build or run for {missing}; install {' '.join(packages)}")
        libraries = self.unpacked / "usr/lib" / f"{HERE}-linux-gnu"  # of the assemblers
        self.env["LD_LIBRARY_PATH"] = str(libraries)

    def download(self, packages: list[str]) -> None:
        if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
            return
        archives, lists = self.work / "archives", self.work / "lists"
        for folder in (archives, lists):
            (folder / "partial").mkdir(parents=True, exist_ok=True)
        options = ["-q", "-o", "Debug::NoLocking=1", "-o", f"Dir::Cache::archives={archives}/"]
        get = [*options, "--download-only", "--no-install-recommends", "-y", "install", *packages]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if subprocess.run(["apt-get", *get], check=False, **quiet).returncode:
            own = ["-o", f"Dir::State::lists={lists}/"]  # the system's lists of packages are old
            subprocess.run(["apt-get", *options, *own, "update"], check=False, **quiet)
            subprocess.run(["apt-get", *own, *get], check=False, **quiet)
        for archive in archives.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(archive), str(self.unpacked)], check=True)


def run(command: list[str], **options: object) -> None:
    """Run a command; on failure its output and an exit."""
    result = subprocess.run(command, check=False, capture_output=True, text=True, **options)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\n{(result.stdout + result.stderr)[-4000:]}")


def build(folder: Path, options: list[str], env: dict[str, str]) -> Path:
    """Configure and build with the native tests; returns their program."""
    began = time.monotonic()
    command = ["cmake", "-S", str(ROOT / "kernels"), "-B", str(folder), "-DOCTAVO_NATIVE_TESTS=ON"]
    run([*command, *options], env=env)
    run(["cmake", "--build", str(folder), "-j", str(os.cpu_count() or 1)], env=env)
    print(f"built {folder.name} in {time.monotonic() - began:.0f} s", flush=True)
    return folder / "native_tests"


def measure(machine: str, cpu: str, command: list[str], failures: list[str]) -> list[Row]:
    """Run the tests; a row per variant they ran."""
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = [line.split() for line in result.stdout.splitlines()]
    rows = [Row(machine, cpu, w[1], w[2], w[3]) for w in lines if w[:1] == ["passed"]]
    if result.returncode or not rows:
        failures.append(
            f"{machine} as {cpu}: status {result.returncode}\n{result.stdout}{result.stderr}"
        )
    return rows


def objdump_of(tools: Tools, target: Target) -> str:
    found = tools.find(f"{target.triplet}-objdump")
    assert found, "a compiler without binutils"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build/cross_cpu", help="folder to work in"
    )
    parser.add_argument("--no-sanitizers", action="store_true", help="leave the sanitizers out")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    tools = Tools(work)
    targets = [t for t in TARGETS if t.machine != HERE]
    tools.need(targets)

    failures: list[str] = []
    jobs: list[tuple[str, str, list[str]]] = []
    code: dict[tuple[str, str], str] = {}

    def examine(machine: str, folder: Path, objdump: str, env: dict[str, str]) -> None:
        findings, described = check_build(machine, folder, objdump, env)
        failures.extend(f"{machine}: {finding}" for finding in findings)
        code.update({(machine, isa): text for isa, text in described.items()})

    own = build(work / HERE, [], dict(os.environ))
    examine(HERE, work / HERE, "objdump", dict(os.environ))
    jobs.append((HERE, "this", [str(own)]))
    for target in targets:
        compiler = tools.find(f"{target.triplet}-g++")
        qemu = tools.qemu(target.machine)
        assert compiler and qemu
        root = tools.sysroot(compiler)
        flags = [] if root == Path("/") else [f"-DCMAKE_CXX_FLAGS=--sysroot={root}"]
        system = ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={target.machine}"]
        program = build(
            work / target.machine, [*system, f"-DCMAKE_CXX_COMPILER={compiler}", *flags], tools.env
        )
        examine(target.machine, work / target.machine, objdump_of(tools, target), tools.env)
        for cpu, variant in target.cpus.items():
            command = [qemu, "-cpu", cpu, "-L", str(root / "usr" / target.triplet), str(program)]
            jobs.append((target.machine, cpu, [*command, "--best", "--expect", variant]))
    if not options.no_sanitizers:
        best = subprocess.run(
            [str(own), "--chosen"], check=True, capture_output=True, text=True
        ).stdout.strip()
        leave_out = [
            f"-DOCTAVO_CAN_{isa}=OFF" for machine, isa in code if machine == HERE and isa != best
        ]
        for name in ("address,undefined", "thread"):
            folder = work / f"{HERE}-{name.partition(',')[0]}"
            program = build(folder, [f"-DOCTAVO_SANITIZE={name}", *leave_out], dict(os.environ))
            jobs.append((HERE, f"this, {name} sanitizer", [str(program)]))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = [
            row for found in pool.map(lambda job: measure(*job, failures), jobs) for row in found
        ]

    print(
        f"{'machine':9}{'CPU':32}{'variant':13}{'checks':>9}  inner loops: multiply-adds of all instructions"
    )
    for row in rows:
        made_of = code.get((row.machine, row.variant), "")
        print(f"{row.machine:9}{row.cpu:34}{row.variant:13}{row.checks:>9}  {made_of}")
    ran = {(row.machine, row.variant) for row in rows}
    for (machine, isa), text in code.items():
        if (machine, isa) not in ran:
            print(f"{machine:9}{'not run: no such CPU':34}{isa:13}{'-':>9}  {text}")
    if len({row.tokens for row in rows}) > 1:
        failures.append(
            f"seeded samples differ between variants: {[(r.machine, r.variant, r.tokens) for r in rows]}"
        )
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
