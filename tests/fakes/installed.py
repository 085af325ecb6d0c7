"""Installs an example plug-in from its own source, as a third party's package is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def builds_wheels() -> bool:
    """Whether setuptools here can build (it has bdist_wheel of its own since 70.1): that of an environment
    fresh from venv cannot. Else pip fetches one to build with. Asks the metadata: importing setuptools
    after distutils, which other tests may have brought, fails."""
    try:
        major, minor = version("setuptools").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (70, 1)


EXAMPLES = Path(__file__).parents[2] / "plugins" / "examples"


def install(name: str, where: Path) -> Path:
    """The folder below `where` into which pip has put example `name`."""
    source, target = where / "source", where / "site"
    shutil.copytree(EXAMPLES / name, source)  # a build writes beside its sources
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--target", str(target)]
    if builds_wheels():
        command += ["--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target
