"""Builds empty libraries in the place of CANN's, so that torch-npu can be imported without a chip or its driver.

Every symbol that torch-npu wants and nobody has becomes a function that returns 0. That is enough for its
schemas, its meta functions and its Python; whatever would reach a device does nothing.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from ctypes import CDLL, RTLD_GLOBAL
from importlib.util import find_spec
from pathlib import Path

OBJECTS = ("_ZTI", "_ZTV", "_ZTS")  # type information and tables of virtual functions are data
SYSTEM = ("libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2")


def folder_of(package: str) -> Path:
    """Where a package lies, without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent


def symbols(library: Path | str, kind: str) -> set[str]:
    """Names of dynamic symbols; kind is nm's --defined-only or --undefined-only."""
    command = ["nm", "-D", "--without-symbol-versions", kind, str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1] for line in lines if line.strip()}


def needed(library: Path) -> list[str]:
    """The libraries that one names."""
    out = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    )
    return re.findall(r"\(NEEDED\).*\[(.*)\]", out.stdout)


def system_libraries() -> list[str]:
    command = ["gcc", "-print-file-name="]
    found = [
        subprocess.run([command[0], command[1] + name], capture_output=True, text=True).stdout
        for name in SYSTEM
    ]
    return [path.strip() for path in found if Path(path.strip()).is_absolute()]


def assembly(names: Iterable[str]) -> str:
    lines = [".text"]
    functions = [n for n in sorted(names) if not n.startswith(OBJECTS)]
    for name in functions:
        lines.append(f'.globl "{name}"\n.type "{name}",@function\n"{name}":\n xorl %eax,%eax\n ret')
    lines.append(".data\n.align 16")
    for name in sorted(set(names) - set(functions)):
        lines.append(f'.globl "{name}"\n.type "{name}",@object\n"{name}":\n .zero 256')
    lines.append('.section .note.GNU-stack,"",@progbits\n')
    return "\n".join(lines)


def build(name: str, names: Iterable[str], folder: Path) -> Path:
    source, library = folder / f"{name}.s", folder / name
    source.write_text(assembly(names))
    command = [
        "gcc",
        "-shared",
        "-nostdlib",
        f"-Wl,-soname,{name}",
        "-o",
        str(library),
        str(source),
    ]
    subprocess.run(command, check=True)
    return library


def make(folder: Path) -> list[Path]:
    """Builds the stubs for the installed torch-npu into `folder`; those of the core first."""
    npu, torch = folder_of("torch_npu"), folder_of("torch")
    core = [next(npu.glob("_C*.so")), *sorted((npu / "lib").glob("*.so"))]
    atb = npu / "lib" / "libop_plugin_atb.so"
    core.remove(atb)
    beside = list((torch / "lib").glob("*.so*"))
    python = {
        n for lib in core for n in symbols(lib, "--undefined-only") if n.startswith(("Py", "_Py"))
    }
    have = set().union(
        *(symbols(p, "--defined-only") for p in (*core, *beside, *system_libraries()))
    )
    want = set().union(*(symbols(p, "--undefined-only") for p in core)) - have - python
    ours = {p.name for p in (*core, *beside)} | set(SYSTEM)
    absent = sorted({n for p in core for n in needed(p)} - ours - _resolvable())
    made = [build(name, want if i == 0 else (), folder) for i, name in enumerate(absent)]
    rest = symbols(atb, "--undefined-only") - have - want - python
    made += [build(name, rest, folder) for name in needed(atb) if name == "libatb.so"]
    return made


def _resolvable() -> set[str]:
    """Libraries of this machine that the loader finds by itself."""
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    python = sysconfig.get_config_var("INSTSONAME") or ""
    return set(re.findall(r"^\s*(\S+) \(", cache, re.MULTILINE)) | {python}


def load() -> None:
    """Puts the stubs where torch-npu's libraries look for their own: already loaded, under those names."""
    npu = folder_of("torch_npu")
    version = (npu / "version.py").read_bytes() + Path(__file__).read_bytes()
    digest = hashlib.sha256(version + sys.version.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"octavo-stub-cann-{digest}"
    order = folder / "order"
    if not order.exists():
        folder.mkdir(exist_ok=True)
        made = make(folder)
        order.write_text("\n".join(str(path) for path in made))
    for path in order.read_text().splitlines():
        CDLL(path, mode=RTLD_GLOBAL)
