"""`octavo backend new NAME`: an installable package with a backend that works at once."""

from __future__ import annotations

import argparse
import json
import re
import sys
from importlib import metadata
from pathlib import Path

from octavo.core.config import ConfigError

_PLACEHOLDER = "mychip"
_LONGEST = 32


def add_arguments(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The action's options."""
    new = actions.add_parser("new", help="write an installable package with a backend to build on")
    new.add_argument(
        "NAME", help="the chip: a word of small letters, digits and _; --device takes it"
    )
    new.add_argument(
        "--path", metavar="DIR", type=Path, help="the folder to make; default: ./octavo-NAME"
    )
    new.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    """Writes the package and says what to do with it.

    Raises:
        ConfigError: the name cannot be one or is taken, or the folder cannot be made.
    """
    name = checked_name(options.NAME)
    folder = options.path if options.path is not None else Path(f"octavo-{name.replace('_', '-')}")
    for written in write(name, folder):
        print(written)
    print(
        f"\nnext:\n  {sys.executable} -m pip install --no-deps -e {folder}\n  octavo backend check {name}\n"
        f"  octavo generate --device {name} --prompt 'Hello' --max-tokens 8"
    )


def checked_name(name: str) -> str:
    """The name, if a backend can have it.

    Raises:
        ConfigError: it is no name, or a backend here has it already.
    """
    from octavo.plugins.manager import plugins

    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > _LONGEST:
        raise ConfigError(
            f"{name!r} cannot name a backend: use small letters, digits and single _ between them, a letter "
            f"first, {_LONGEST} at most, as mychip or my_chip2"
        )
    if name == "auto":
        raise ConfigError(
            "'auto' is what --device takes for the best there is; choose another name"
        )
    for row in plugins().devices():
        if name in (row.word, row.backend):
            raise ConfigError(
                f"{name!r} is taken by backend {row.backend!r} of {row.distribution}; choose another name"
            )
    return name


def write(name: str, folder: Path) -> list[Path]:
    """Writes the package and returns its files.

    Raises:
        ConfigError: the folder exists with something in it, or cannot be made.
    """
    import octavo

    source = Path(octavo.__file__).parent / "plugins" / "template"
    words = {
        f"octavo-{_PLACEHOLDER}": f"octavo-{name.replace('_', '-')}",
        "Mychip": "".join(part.capitalize() for part in name.split("_")),
        _PLACEHOLDER: name,
        # In the workflow alone.
        'OCTAVO: "octavo"': f"OCTAVO: {json.dumps(where_from(_direct_url()))}",
    }
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists already: choose another with --path, or take it away first"
        )
    written = []
    try:
        for file in sorted(p for p in source.rglob("*") if p.is_file()):
            if "__pycache__" in file.parts:
                continue
            # Files with a dot in front do not get into a wheel under their own names.
            name_here = str(file.relative_to(source)).replace("dot-git", ".git")
            target = folder / _replaced(name_here, words)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_replaced(file.read_text("utf-8"), words), "utf-8")
            written.append(target)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error}; choose another with --path"
        ) from error
    return written


def where_from(direct_url: str | None) -> str:
    """The requirement by which another machine gets the Octavo that is installed here.

    direct_url: what its `direct_url.json` says (the packaging specifications' "Recording the Direct URL
    Origin"), None when it came from an index. An install from a file of this machine's is none that another
    machine could repeat, and gives the name too. A commit is pinned only where the installer was asked for it.
    """
    source = json.loads(direct_url) if direct_url else {}
    url = str(source.get("url", ""))
    if not url or url.startswith("file:"):
        return "octavo"
    if version_control := source.get("vcs_info"):
        url = f"{version_control['vcs']}+{url}"
        if revision := version_control.get("requested_revision"):
            url += f"@{revision}"
    if folder := source.get("subdirectory"):
        url += f"#subdirectory={folder}"
    return f"octavo @ {url}"


def _direct_url() -> str | None:
    try:
        return metadata.distribution("octavo").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # run from its files alone
        return None


def _replaced(text: str, words: dict[str, str]) -> str:
    for before, after in words.items():
        text = text.replace(before, after)
    return text
