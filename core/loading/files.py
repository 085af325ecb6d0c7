"""What a resolved model is: files on this machine, and where they came from."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.core.loading.errors import CorruptFileError

_BLOCK = 4 << 20


@dataclass(frozen=True)
class ModelFiles:
    """A model's files, all local.

    name: what a server calls the model unless told otherwise.
    kind: "folder" (config.json and safetensors) or "gguf" (one file that holds everything).
    path: the folder, or the .gguf file.
    origin: MODEL as it was asked for.
    version: a package's version or a hub commit; None for local files.
    sha256: of the weights file, where it is known without reading the file again.
    derived_dir: where files made from this model (a converted tokenizer) may be kept; None: nowhere.
    """

    name: str
    kind: Literal["folder", "gguf"]
    path: Path
    origin: str
    version: str | None = None
    sha256: str | None = None
    derived_dir: Path | None = None


def read_json(path: Path) -> Any:
    """The JSON value in ``path``. Raises CorruptFileError naming the file when it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptFileError(
            f"{path} is not valid JSON ({error}). Fetch the model again or repair the file."
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def drop_pages(data: mmap.mmap, offset: int, nbytes: int) -> None:
    """Gives back the memory of a part of a mapped file that nobody wrote to. It stays readable."""
    first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED, first, size)


def file_identity(path: Path) -> dict[str, int]:
    """Size in bytes and modification time in ns: enough to notice that a file was replaced."""
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def sha256_of(path: Path) -> str:
    """The hex SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
