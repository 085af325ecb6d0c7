#!/usr/bin/env python3
"""The whole engine as CPUs that this machine is not: ARM and POWER, under qemu, with tiny random models.

Builds the CPU kernels for the machine, puts Python, torch and the engine's other packages into a folder,
and runs `tiny_engine.py` there, on the CPU backend and on the reference backend. In float32 both must
give the tokens that the reference backend gives here; in smaller formats, where a backend's rounding is
its own, those that the CPU backend gives here. Ends with 1 if anything differs.

Python comes from Debian's packages for that machine; torch from PyPI's wheels for ARM, from Debian for
POWER, for which msgspec, too old there, is compiled from its source. Everything is downloaded once and unpacked in the work folder; nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cross_cpu import ROOT, TARGETS, Tools, build, run

SUITE = "trixie"
# Where the mirror no longer has a package's version that its list names, the one of this suite will do.
LATER_SUITE = "forky"
PYTHON = "3.13"  # that of the suite
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")  # package debian-archive-keyring
WHEELS = ROOT / "ci/requirements/qemu-aarch64.txt"


@dataclass(frozen=True)
class Machine:
    """architecture: Debian's word; cpu: qemu's; isa: the kernels that must be chosen on it; folder: of
    libraries; wheels: those of WHEELS are there for it; else msgspec is compiled."""

    name: str
    architecture: str
    cpu: str
    isa: str
    folder: str
    packages: tuple[str, ...]
    wheels: bool


MACHINES = {
    "aarch64": Machine(
        "aarch64",
        "arm64",
        "cortex-a76",
        "dotprod",
        "aarch64-linux-gnu",
        ("python3", "libstdc++6", "libgomp1"),
        True,
    ),
    "ppc64le": Machine(
        "ppc64le",
        "ppc64el",
        "power10",
        "power10",
        "powerpc64le-linux-gnu",
        (
            "python3-torch",
            f"libpython{PYTHON}-dev",
            "python3-pluggy",
            "python3-packaging",
            "python3-platformdirs",
        ),
        False,
    ),
}


def mirror() -> str:
    """Where this machine gets Debian's packages from. SystemExit: nowhere."""
    fields = ["Created-By: Packages", "Origin: Debian", "Label: Debian", "Component: main"]
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", *fields]
    if shutil.which("apt-get"):
        found = subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()
        if found:
            return found[0]
    sys.exit("this machine has no Debian packages: name a mirror of them with --mirror")


class Packages:
    """Debian's packages for another machine, downloaded and unpacked without installing any."""

    def __init__(self, work: Path, machine: Machine, uri: str) -> None:
        self.work, self.machine = work, machine
        self.archives = work / "archives"
        for folder in (work / "lists/partial", self.archives / "partial"):
            folder.mkdir(parents=True, exist_ok=True)
        (work / "status").touch()
        (work / "sources.list").write_text(
            "".join(
                f"deb [signed-by={KEYS}] {uri} {suite} main\n" for suite in (SUITE, LATER_SUITE)
            ),
            "utf-8",
        )
        settings = {
            "APT::Architecture": machine.architecture,
            "APT::Architectures": machine.architecture,
            "APT::Default-Release": SUITE,
            "APT::Install-Recommends": "0",
            "Acquire::Languages": "none",
            "Debug::NoLocking": "1",
            "Dir::Cache::archives": f"{self.archives}/",
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "Dir::Etc::sourcelist": str(work / "sources.list"),
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": f"{work}/lists/",
            "Dir::State::status": str(work / "status"),
        }
        text = "".join(f'{name} "{value}";\n' for name, value in settings.items())
        (work / "apt.conf").write_text(text, "utf-8")
        self.env = {**os.environ, "APT_CONFIG": str(work / "apt.conf")}

    def apt(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs apt-get over these packages alone."""
        return subprocess.run(
            ["apt-get", "-q", "-y", *words],
            check=False,
            capture_output=True,
            text=True,
            env=self.env,
            cwd=self.archives,
        )

    def unpack(self, root: Path) -> None:
        """The machine's packages, and all that they depend on, as files below `root`."""
        update = self.apt("update")
        if update.returncode:
            sys.exit(f"apt-get update\n{update.stderr[-2000:]}")
        wanted = ["install", "--no-install-recommends", *self.machine.packages]
        self.apt("--download-only", *wanted)
        listed = self.apt("--print-uris", *wanted).stdout
        missing = re.findall(r"^'\S+' ([^_\s]+)_\S+\.deb ", listed, re.M)
        if missing:
            found = self.apt("download", *(f"{name}/{LATER_SUITE}" for name in missing))
            if found.returncode:
                sys.exit(f"{', '.join(missing)}: not to be had\n{found.stderr[-2000:]}")
        archives = sorted(self.archives.glob("*.deb"))
        if not archives:
            sys.exit(f"no packages\n{self.apt('--download-only', *wanted).stderr[-2000:]}")
        for name in ("lib", "lib64"):  # as in an installed system, where base-files makes them
            (root / "usr" / name).mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(f"usr/{name}")
        for archive in archives:
            subprocess.run(["dpkg-deb", "-x", str(archive), str(root)], check=True)


def unpack_wheels(work: Path, site: Path) -> None:
    """The wheels of WHEELS as files below `site`."""
    wheels = work / "wheels"
    tags = [f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)] + ["manylinux2014_aarch64"]
    words = [word for tag in tags for word in ("--platform", tag)]
    words += ["--python-version", PYTHON, "--implementation", "cp", "--no-deps"]
    words += [w for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none") for w in ("--abi", abi)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    run([*pip, "--only-binary=:all:", "-r", str(WHEELS), "-d", str(wheels), *words])
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)


def compile_msgspec(work: Path, root: Path, compiler: list[str], env: dict[str, str]) -> None:
    """The msgspec of constraints.txt below `root`: Debian's has no StructMeta to derive from. Its extension is
    one file, compiled against the Python in `root`."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    constraints = str(ROOT / "constraints.txt")
    sources = work / "sources"
    shutil.rmtree(sources, ignore_errors=True)
    words = ["--no-deps", "--no-binary", "msgspec", "-c", constraints, "msgspec"]
    run([*pip, "-d", str(sources), *words])
    with tarfile.open(next(sources.glob("msgspec-*.tar.gz"))) as packed:
        packed.extractall(sources, filter="data")
    package = root / "site/msgspec"
    shutil.copytree(next(sources.glob("msgspec-*/src/msgspec")), package)
    headers = root / "usr/include"
    # The headers of the compiler's own libc come first: those in `root` are another version's.
    options = ["-I", str(headers / f"python{PYTHON}"), "-idirafter", str(headers)]
    options += ["-x", "c", "-O2", "-DNDEBUG", "-fPIC", "-shared"]
    # A name without the machine in it, which every Python for that machine looks for too.
    out = ["-o", str(package / "_core.abi3.so")]
    run([*compiler, *options, str(package / "_core.c"), *out], env=env)


def sysroot(machine: Machine, work: Path, uri: str | None, tools: Tools, compiler: str) -> Path:
    """The machine's Python and torch, made once; made anew when what it is made of changes."""
    root, stamp = work / "root", work / "made-of"
    pinned = WHEELS if machine.wheels else ROOT / "constraints.txt"
    made_of = f"{machine} {SUITE} {pinned.read_text('utf-8')}"
    if stamp.exists() and stamp.read_text("utf-8") == made_of:
        return root
    began = time.monotonic()
    shutil.rmtree(root, ignore_errors=True)
    stamp.unlink(missing_ok=True)
    Packages(work / "debian", machine, uri or mirror()).unpack(root)
    if machine.wheels:
        unpack_wheels(work, root / "site")
    else:
        command = [compiler, f"--sysroot={tools.sysroot(compiler)}"]
        compile_msgspec(work, root, command, tools.env)
    stamp.write_text(made_of, "utf-8")
    print(f"unpacked {machine.name}'s torch in {time.monotonic() - began:.0f} s", flush=True)
    return root


def lay_out(target: Path, library: Path) -> None:
    """The engine's Python files below `target`, the kernels in their place, and the entry points that an
    installation would write."""
    shutil.rmtree(target, ignore_errors=True)
    leave_out = shutil.ignore_patterns("__pycache__", "csrc", "examples", "*.so")
    shutil.copytree(ROOT / "src/octavo", target / "octavo", ignore=leave_out)
    shutil.copy(library, target / "octavo/kernels/cpu/liboctavo_cpu.so")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    info = target / f"octavo-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: octavo\nVersion: {project['version']}\n", "utf-8"
    )
    points = project["entry-points"]["octavo"].items()
    lines = "".join(f"{name} = {module}\n" for name, module in points)
    (info / "entry_points.txt").write_text(f"[octavo]\n{lines}", "utf-8")


def last_line(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """What `tiny_engine.py` prints last. SystemExit: it failed."""
    result = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    )
    if result.returncode:
        sys.exit(f"{' '.join(command)}\nended with status {result.returncode}")
    out: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return out


def differences(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """Where the tokens of the other machine are not those they must be."""
    out = []
    for name, tokens in there.items():
        _, form, model = name.split(" / ")
        judge = f"reference / {form} / {model}" if form == "float32" else name
        if tokens != here[judge]:
            out.append(f"{name}: {tokens}\n  instead of {here[judge]} ({judge}, here)")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("machine", choices=tuple(MACHINES))
    parser.add_argument("--work", type=Path, default=ROOT / "build", help="folder to work in")
    parser.add_argument(
        "--mirror", metavar="URI", help="of Debian's packages; default: this machine's"
    )
    options = parser.parse_args()
    machine = MACHINES[options.machine]
    work = options.work.resolve() / "qemu_engine" / machine.name
    work.mkdir(parents=True, exist_ok=True)
    target = next(t for t in TARGETS if t.machine == machine.name)
    tools = Tools(
        options.work.resolve() / "cross_cpu"
    )  # the compilers that the kernels' lane unpacks
    tools.work.mkdir(parents=True, exist_ok=True)
    tools.need([target])
    compiler, qemu = tools.find(f"{target.triplet}-g++"), tools.qemu(machine.name)
    assert compiler and qemu
    own = tools.sysroot(compiler)
    flags = [] if own == Path("/") else [f"-DCMAKE_CXX_FLAGS=--sysroot={own}"]
    system = ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={machine.name}"]
    built = tools.work / machine.name
    build(built, [*system, f"-DCMAKE_CXX_COMPILER={compiler}", *flags], tools.env)
    root = sysroot(machine, work, options.mirror, tools, compiler)
    lay_out(work / "engine", built / "liboctavo_cpu.so")
    models, program = work / "models", str(ROOT / "ci/tiny_engine.py")
    run([sys.executable, program, "--make", str(models)])

    libraries = root / "usr/lib" / machine.folder
    places = [libraries, libraries / "openblas-pthread", libraries / "blas", libraries / "lapack"]
    # Set for the program under qemu alone: qemu itself belongs to this machine.
    set_inside = [
        f"LD_LIBRARY_PATH={':'.join(map(str, places))}",
        f"PYTHONPATH={work / 'engine'}:{root / 'site'}",
    ]
    emulate = [qemu, "-cpu", machine.cpu, "-L", str(root)]
    emulate += [word for value in set_inside for word in ("-E", value)]
    python = str(root / f"usr/bin/python{PYTHON}")
    devices = ["reference", "cpu"]
    here = last_line([sys.executable, program, str(models), *devices], {})
    began = time.monotonic()
    there = last_line([*emulate, python, program, str(models), *devices], {})
    took = time.monotonic() - began
    faults = differences(here["tokens"], there["tokens"])
    if there["isa"] != machine.isa:
        faults.append(f"the kernels of {there['isa']} ran, not those of {machine.isa}")
    lists = sum(len(tokens) for tokens in there["tokens"].values())
    print(
        f"{lists} token lists of {len(there['tokens'])} engines on {machine.name} as {machine.cpu} "
        f"(kernels {there['isa']}, torch {there['torch']}, Python {there['python']}): "
        f"{len(faults)} faults; {took:.0f} s, {there['seconds']:.0f} s of them in the engine"
    )
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
